"""Where the private keys are found. Inputs and state say only which one; the key is read when it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import UserError

if TYPE_CHECKING:
    from components.settings import Settings

STACK_KEY = "config:sshPrivateKey"
_SANDBOX = "sandbox:"


def sandbox_credential(container: str) -> str:
    return _SANDBOX + container


def is_sandboxed(credential: str) -> bool:
    """Whether this is a sandbox's key."""
    return credential.startswith(_SANDBOX)


def sandbox_keys(container: str) -> Path:
    """The directory that holds a sandbox's generated keys, outside every repository."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "lora-pods" / "sandbox" / container


def private_key_text(credential: str, settings: Settings) -> str:
    """The private key that `credential` names. Raises UserError where it is not there."""
    if credential == STACK_KEY:
        if settings.ssh_private_key is None:
            raise UserError("lora-pods:sshPrivateKey is not set")
        return settings.ssh_private_key
    path = sandbox_keys(credential.removeprefix(_SANDBOX)) / "id_ed25519"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the sandbox's key {path} cannot be read ({error.strerror}): remove its container and run pulumi up again"
        ) from None
