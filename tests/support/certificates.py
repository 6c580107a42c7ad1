"""Certificates for tests."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(name: str, days: float = 90, key: str | None = None) -> tuple[str, str]:
    """A certificate and its private key, as PEM; of `key`, or of a new one."""
    made = ec.generate_private_key(ec.SECP256R1())
    if key is not None:
        loaded = serialization.load_pem_private_key(key.encode(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        made = loaded
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    over = datetime.now(timezone.utc) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(made.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(over - timedelta(days=400))
        .not_valid_after(over)
        .sign(made, hashes.SHA256())
    )
    private = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
