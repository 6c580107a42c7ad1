"""What things are called on a pod: digests, units, the names in documents that become names of files."""

from __future__ import annotations

import hashlib
import re

from .said import Refusal, shown

POD_ROOT = "/var/lib/lora-pods"
UNITS_DIR = "/etc/systemd/system"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
BLOB_PATH = re.compile(r"blobs/sha256/([0-9a-f]{64})")


def name_of(value: object, what: str) -> str:
    """A stack, model or engine: becomes one file name, so nothing that could climb or hide."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Refusal("%s is not a usable %s: letters, digits, '.', '_' and '-' only" % (shown(value), what))
    return value


def hex_of(digest: object) -> str:
    match = DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise Refusal("%s is not a digest: sha256: and 64 lowercase hex digits" % shown(digest))
    return match.group(1)


def unit_name(engine: str) -> str:
    return "lora-pods-%s.service" % engine


def proxy_name(engine: str) -> str:
    return "lora-pods-%s-proxy.service" % engine


def engine_of(stack: str, base: str) -> str:
    """What the engine of a stack's base is called: as the program that sends documents calls it (naming.engine_key)."""
    slug = re.sub(r"[^a-z0-9.]+", "-", base.lower()).strip("-.")[:80]
    return "%s-%s-%s" % (stack, slug, hashlib.sha256(base.encode("utf-8")).hexdigest()[:8])
