"""SSH keys that are made or read here. `cryptography` is loaded when one is: a preview of hosts needs none."""

from __future__ import annotations

from components.core.errors import UserError


def new_key() -> tuple[str, str]:
    """A new Ed25519 key: the private half as OpenSSH writes it, and the public one as `ssh-ed25519 <base64>`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private.decode(), public.decode()


def public_half(private_key: str) -> str:
    """`<type> <base64>` of a private key as OpenSSH or PEM has it. Raises UserError, which never quotes the key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

    text = private_key.encode()
    load = (
        serialization.load_ssh_private_key
        if b"BEGIN OPENSSH" in text.split(b"\n", 1)[0]
        else serialization.load_pem_private_key
    )
    try:
        key = load(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError("lora-pods:sshPrivateKey is damaged: it has the form of a key, and is none") from None
    if not isinstance(key, (Ed25519PrivateKey, RSAPrivateKey)):
        raise UserError(
            "lora-pods:sshPrivateKey is neither an Ed25519 nor an RSA key, and EC2 takes no others: make one with "
            "`ssh-keygen -t ed25519`"
        )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode()
