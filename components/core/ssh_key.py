"""What can be known of an SSH key from its text, without any SSH library: enough to refuse a wrong one at preview.

The formats are those of OpenSSH: PROTOCOL.key (private keys, magic `openssh-key-v1`), RFC 4253 section 6.6 (public
key blobs), and PEM for older private keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from components.core.errors import UserError, printable

_MAGIC = b"openssh-key-v1\x00"
_KINDS = {
    "ssh-ed25519": "ED25519",
    "ssh-rsa": "RSA",
    "ecdsa-sha2-": "ECDSA",
    "sk-ssh-ed25519": "ED25519-SK",
    "sk-ecdsa-sha2-": "ECDSA-SK",
}


def normalise_private_key(text: str) -> str:
    """Return the key with Unix line ends and one final newline.

    Raises UserError, which never quotes the key, if the text is a path, a public key, encrypted, or no key at all.
    """
    key = text.replace("\r\n", "\n").strip() + "\n"
    lines = key.splitlines()
    if re.match(r"(ssh|ecdsa|sk)-\S+ [A-Za-z0-9+/]", key):
        raise UserError("this is a public key; put the private one there (the file without .pub)")
    if not lines[0].startswith("-----BEGIN ") or "PRIVATE KEY-----" not in lines[0]:
        if len(lines) == 1 and ("/" in key or key.startswith("~")) and len(key) < 512:
            raise UserError(
                "this is a path, not a key; store the file's text: "
                "`pulumi config set --secret sshPrivateKey < ~/.ssh/id_ed25519`"
            )
        raise UserError("no private key: it must begin with -----BEGIN OPENSSH PRIVATE KEY----- (was the header lost?)")
    if not lines[-1].startswith("-----END "):
        raise UserError("the private key is cut off: its -----END line is missing")
    if _is_encrypted(lines):
        raise UserError(
            "the private key is protected by a passphrase; use one without "
            "(`ssh-keygen -p -f COPY` removes it), since pulumi cannot ask for it"
        )
    return key


def _is_encrypted(lines: list[str]) -> bool:
    if "ENCRYPTED" in lines[0] or any(line.startswith("Proc-Type: 4,ENCRYPTED") for line in lines):
        return True
    if "OPENSSH" not in lines[0]:
        return False
    try:
        blob = base64.b64decode("".join(lines[1:-1]), validate=True)
    except (binascii.Error, ValueError):
        raise UserError("the private key is damaged: its middle is not base64") from None
    if not blob.startswith(_MAGIC):
        raise UserError("the private key is damaged: it does not begin as an OpenSSH key does")
    rest = blob[len(_MAGIC) :]
    return rest[4 : 4 + int.from_bytes(rest[:4], "big")] != b"none"


def normalise_host_key(text: str) -> str:
    """Return `<type> <base64>` of a host key given as a .pub file, a known_hosts line or ssh-keyscan's output has it.

    Raises UserError if there is none in it, or more than one.
    """
    found = re.findall(
        r"(?:^|[\s,])((?:ssh-ed25519|ssh-rsa|ecdsa-sha2-|sk-)[\w@.-]*) ([A-Za-z0-9+/]+={0,2})(?=\s|$)",
        text.strip(),
        flags=re.MULTILINE,
    )
    if "…" in text or "..." in text:
        raise UserError("is still a placeholder; put what `ssh-keyscan -t ed25519 ADDRESS` prints there")
    if len(found) != 1:
        raise UserError(
            'one key is wanted, as in "ssh-ed25519 AAAA…" (`ssh-keyscan -t ed25519 ADDRESS` prints it; compare its '
            "fingerprint with the machine's own)"
        )
    kind, blob = found[0]
    try:
        raw = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError):
        raise UserError("the host key's second word is not base64: was it cut off?") from None
    fields = _fields(raw)
    if len(fields) < 2 or fields[0] != kind.encode():
        raise UserError(f"the host key says {kind}, and its bytes are not such a key: was it cut off?")
    return f"{kind} {blob}"


def _fields(raw: bytes) -> list[bytes]:
    """The length-prefixed strings that a public key blob is made of (RFC 4251, section 5); none if they do not fit."""
    fields, position = [], 0
    while position < len(raw):
        end = position + 4 + int.from_bytes(raw[position : position + 4], "big")
        if end > len(raw):
            return []
        fields.append(raw[position + 4 : end])
        position = end
    return fields


def fingerprint(host_key: str) -> str:
    """`SHA256:…` of a normalised host key, as ssh-keygen -l prints it."""
    raw = base64.b64decode(host_key.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


def shown_key(host_key: str) -> str:
    """A host key, as `type base64`, in a sentence: `SHA256:… (ED25519)`, both as ssh-keygen -l prints them."""
    kind = host_key.partition(" ")[0]
    for prefix, name in _KINDS.items():
        if kind.startswith(prefix):
            return f"{fingerprint(host_key)} ({name})"
    return f"one of an unknown kind ({printable(kind, 40)})" if kind else "none that can be read"
