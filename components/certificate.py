"""A certificate of the stack file and the secret key to it: whether they belong together, before a pod gets them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from components.core.errors import UserError, os_reason, printable

_SOON = timedelta(days=14)


@dataclass(frozen=True)
class Tls:
    """What a proxy shows (`certificate`, a chain as PEM), and the key to it. `name` is the public key's: no secret."""

    certificate: str
    name: str
    key: str = field(repr=False)


def read_tls(path: Path, shown: str, key: str) -> Tls:
    """Raises UserError, which never quotes the key, where they cannot serve together."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    where = f"tls.certificate: {printable(shown)}"
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({os_reason(error)})") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: is no certificate in PEM (-----BEGIN CERTIFICATE-----)") from None
    if "PRIVATE KEY" in text:
        raise UserError(f"{where}: holds a private key, too; keep the certificate and its chain there, nothing else")
    try:
        chain = x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        raise UserError(f"{where}: is no certificate in PEM (-----BEGIN CERTIFICATE-----)") from None
    try:
        private = serialization.load_pem_private_key(key.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError(
            "tls: lora-pods:tlsKey is no private key in PEM without a passphrase: "
            "`pulumi config set --secret tlsKey < privkey.pem`"
        ) from None
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    public = chain[0].public_key().public_bytes(*form)
    if private.public_key().public_bytes(*form) != public:
        raise UserError(f"{where}: belongs to another key than lora-pods:tlsKey; its own certificate must come first")
    blocks = [certificate.public_bytes(serialization.Encoding.PEM).decode() for certificate in chain]
    normal = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Tls("".join(blocks), hashlib.sha256(public).hexdigest()[:16], normal.decode())


def warnings_of(tls: Tls, shown: str) -> Iterator[str]:
    """One that is over is no fault: it must not keep anybody from going back."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(tls.certificate.encode())
    begins, over = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins > datetime.now(timezone.utc):
        yield f"tls.certificate: {printable(shown)} is valid from {begins:%Y-%m-%d} on: clients refuse it until then"
    if over <= datetime.now(timezone.utc):
        yield f"tls.certificate: {printable(shown)} was valid until {over:%Y-%m-%d}: clients refuse it; renew it"
    elif over - datetime.now(timezone.utc) < _SOON:
        yield f"tls.certificate: {printable(shown)} is valid until {over:%Y-%m-%d} only; renew it"
