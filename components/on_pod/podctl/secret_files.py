"""Secrets: what an engine's environment holds and its proxy's keys, kept by revision and by name."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from . import files, units
from .documents import Document, field, optional
from .names import name_of
from .said import Refusal, clean, shown
from .store import Store


def secrets_text(revision: int, secrets: Mapping[str, str]) -> str:
    """An EnvironmentFile. In double quotes systemd takes every character as it is but for these four (env-file.c)."""
    lines = ["# revision %d" % revision]
    for name, value in sorted(secrets.items()):
        lines.append('%s="%s"' % (name, re.sub(r'(["\\`$])', r"\\\1", value)))
    return "\n".join(lines) + "\n"


def secrets_file(store: Store, engine: str, revision: Optional[int] = None) -> str:
    """The file of one revision; without one, the file in force."""
    return store.path("secrets", engine + (".env" if revision is None else ".%d.env" % revision))


def write_secrets(store: Store, engine: str, raw: bytes, revision: Optional[int] = None) -> None:
    files.make_dirs(store.path("secrets"), 0o700)
    files.write_file(secrets_file(store, engine, revision), raw, 0o600)


def revisions(store: Store, engine: str) -> List[int]:
    """What is kept of an engine's secrets, the newest last."""
    names = (re.fullmatch(re.escape(engine) + r"\.([0-9]+)\.env", name) for name in files.listed(store.path("secrets")))
    return sorted(int(name.group(1)) for name in names if name)


def secrets_bytes(store: Store, engine: str, revision: int) -> bytes:
    """The file of a revision; 0 is that of an engine whose secrets were never set."""
    raw = files.read_file(secrets_file(store, engine, revision)) if revision else secrets_text(0, {}).encode("utf-8")
    if raw is None:
        # Without them vLLM would let in whoever asks.
        raise Refusal(
            "revision %d of the secrets of engine %s is not on this pod: they must be set first" % (revision, engine)
        )
    return raw


def read_secrets(store: Store, engine: str, revision: Optional[int] = None) -> Dict[str, str]:
    """The values of a revision; without one, those in force; none where there is no file."""
    lines = (files.read_file(secrets_file(store, engine, revision)) or b"").decode("utf-8").splitlines()
    pairs = (line.partition("=") for line in lines[1:])
    return {name: re.sub(r"\\(.)", r"\1", value[1:-1]) for name, _, value in pairs}


def tls_key_file(store: Store, engine: str, name: str) -> str:
    return store.path("secrets", "%s.tls-%s.key" % (engine, name))


def tls_keys(store: Store, engine: str) -> List[str]:
    """The names of the private keys that are kept for an engine's proxy."""
    names = (
        re.fullmatch(re.escape(engine) + r"\.tls-([0-9a-f]{16})\.key", name)
        for name in files.listed(store.path("secrets"))
    )
    return [name.group(1) for name in names if name]


def keep_tls_key(store: Store, engine: str, document: Document) -> None:
    """Keeps the key by the name of its public half: a certificate that comes back finds it, one renewed for it too."""
    if optional(document, "tls", dict) is None:
        return
    name, key = field(document, "tls.name", str), field(document, "tls.key", str)
    if not re.fullmatch(r"[0-9a-f]{16}", name) or not key.startswith("-----BEGIN "):
        raise Refusal("the document's tls must be a private key in PEM and the name of its public one")
    path = tls_key_file(store, engine, name)
    if files.read_file(path) != key.encode("utf-8"):
        files.make_dirs(store.path("secrets"), 0o700)
        files.write_file(path, key.encode("utf-8"), 0o600)


def verb_secrets(store: Store, document: Document) -> Document:
    """Keeps these as an engine's newest secrets, for `activate`. The revision rises only when they changed."""
    engine = name_of(field(document, "engine", str), "engine")
    secrets = field(document, "secrets", dict)
    for name, value in secrets.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refusal("%s is not a name for an environment variable" % shown(name))
        # Never with the value: this text ends on a console.
        if not isinstance(value, str):
            raise Refusal("the secret %s must be text" % name)
        if re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]", value):
            raise Refusal("the secret %s holds a line break or another control character: set it again without" % name)
    store.make_staging()
    with store.lock("secrets"):
        keep_tls_key(store, engine, document)
        kept = revisions(store, engine)
        revision = kept[-1] if kept else 0
        if not kept or read_secrets(store, engine, revision) != secrets:
            # Never one that was used before, even where `unsecret` left no trace of it: the activation must run again.
            used = [g.document.get("secretsRevision") or 0 for g in units.generations(store, engine)]
            revision = max(max([revision, *used]) + 1, int(time.time()))
            write_secrets(store, engine, secrets_text(revision, secrets).encode("utf-8"), revision)
    return {"revision": revision}


def drop_secrets(store: Store, paths: Sequence[str]) -> None:
    """Removes files of secrets, for good: what is gone from the stack must not be back after a power cut."""
    removed = [files.unlink(path) for path in paths]
    if any(removed):
        files.fsync_dir(store.path("secrets"))
    files.remove_if_empty(store.path("secrets"))


def redactor(store: Store, engine: str) -> Callable[[str], str]:
    """Makes lines fit to be shown: no secret the engine has or had, nothing that steers a terminal."""
    forms = {""}
    for revision in (None, *revisions(store, engine)):
        for value in read_secrets(store, engine, revision).values():
            # As programs print it: as it is, at the end of a line that lost its spaces, in JSON, in Python's quotes.
            quoted = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))
            forms.update([value, value.strip(), *(text[1:-1] for text in quoted)])
    values = sorted(forms - {""}, key=len, reverse=True)

    def redact(line: str) -> str:
        for value in values:
            line = line.replace(value, "[secret]")
        return clean(line)

    return redact


def drop_old_secrets(store: Store, engine: str) -> None:
    """Removes the revisions that no generation was started with; the newest may be for one to come."""
    used = [generation.document["secretsRevision"] for generation in units.generations(store, engine)]
    old = [secrets_file(store, engine, each) for each in revisions(store, engine)[:-1] if each not in used]
    proxies = " ".join(
        g.document["proxy"]["unit"]["text"] for g in units.generations(store, engine) if g.document.get("proxy")
    )
    keys = [tls_key_file(store, engine, name) for name in tls_keys(store, engine)]
    drop_secrets(store, [*old, *(key for key in keys if os.path.basename(key) not in proxies)])
