"""Names and places that the laptop and the pod must agree on.

Unit names, directories and secrets files live on machines between two runs: changing a rule here orphans what an
earlier release left there. `docs/naming.md` lists them.
"""

from __future__ import annotations

import hashlib
import re

POD_ROOT = "/var/lib/lora-pods"


def engine_key(stack: str, base: str) -> str:
    """Name one engine on a pod: unit, generations, secrets and state directory are called after it.

    The hash keeps bases apart that differ only in characters a unit name cannot hold (systemd.unit(5): letters,
    digits and `:-_.\\`).
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", base.lower()).strip("-.")[:80]
    return f"{stack}-{slug}-{hashlib.sha256(base.encode()).hexdigest()[:8]}"


def unit_name(key: str) -> str:
    return f"lora-pods-{key}.service"


def proxy_unit_name(key: str) -> str:
    """The proxy before an engine that is reached from other machines. No key of an engine ends in `-proxy`."""
    return f"lora-pods-{key}-proxy.service"


def proxy_path(key: str, suffix: str) -> str:
    """The proxy's configuration (`.conf`) or its certificate (`.crt`) on a pod."""
    return f"{POD_ROOT}/proxies/{key}{suffix}"


def tls_key_path(key: str, name: str) -> str:
    """The private key of the certificate whose public key is called `name` (`certificate.Tls`)."""
    return f"{POD_ROOT}/secrets/{key}.tls-{name}.key"


def state_directory(key: str) -> str:
    """The unit's StateDirectory, relative to /var/lib as systemd.exec(5) wants it."""
    return f"lora-pods-{key}"


def blob_path(digest: str) -> str:
    """Where the bundle `sha256:<hex>` lies unpacked on a pod."""
    return f"{POD_ROOT}/blobs/sha256/{digest.removeprefix('sha256:')}"


def url_host(address: str) -> str:
    """An address as it stands in a URL: IPv6 in brackets (RFC 3986, section 3.2.2)."""
    return f"[{address}]" if ":" in address else address


def secrets_path(key: str) -> str:
    return f"{POD_ROOT}/secrets/{key}.env"


def podctl_path(sha256: str) -> str:
    return f"{POD_ROOT}/bin/podctl-{sha256[:12]}.py"


def venv_python(version: str) -> str:
    """The interpreter of the venv that `engine.vllm: {version}` makes on the pod."""
    return f"{POD_ROOT}/venvs/vllm-{version}/bin/python"
