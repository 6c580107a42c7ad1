"""A certificate and the key to it: what cannot serve is a fault of the stack file."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from components.certificate import read_tls, warnings_of
from components.core.errors import UserError
from tests.support.certificates import self_signed

WHERE = "tls.certificate: tls/acme.pem: "


def read(directory: Path, certificate: str, key: str) -> object:
    path = directory / "acme.pem"
    path.write_text(certificate)
    return read_tls(path, "tls/acme.pem", key)


def test_the_name_is_the_public_keys(tmp_path: Path) -> None:
    certificate, key = self_signed("acme")
    (tmp_path / "acme.pem").write_text(certificate)
    tls = read_tls(tmp_path / "acme.pem", "acme.pem", key)
    (tmp_path / "acme.pem").write_text(self_signed("acme", key=key)[0])
    renewed = read_tls(tmp_path / "acme.pem", "acme.pem", "\n" + key.replace("\n", "\r\n"))
    assert (tls.name, tls.key) == (renewed.name, renewed.key)
    assert tls.certificate != renewed.certificate
    assert key.splitlines()[1] not in repr(tls)
    assert list(warnings_of(tls, "acme.pem")) == []


def test_a_chain_is_kept_in_its_order(tmp_path: Path) -> None:
    certificate, key = self_signed("acme")
    above, _ = self_signed("authority")
    (tmp_path / "acme.pem").write_text(certificate + "\n" + above)
    assert read_tls(tmp_path / "acme.pem", "acme.pem", key).certificate == certificate + above
    with pytest.raises(UserError, match="its own certificate must come first"):
        read(tmp_path, above + certificate, key)


def test_what_cannot_serve(tmp_path: Path) -> None:
    certificate, key = self_signed("acme")
    _, other_key = self_signed("acme")
    no_key = "tls: lora-pods:tlsKey is no private key in PEM without a passphrase: "
    for given, given_key, told in (
        ("nothing", key, f"{WHERE}is no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        ("ünï", key, f"{WHERE}is no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        (certificate + key, key, f"{WHERE}holds a private key, too; keep the certificate and its chain there, "),
        (certificate, "-----BEGIN PRIVATE KEY-----\nAAAA", no_key),
        (certificate, other_key, f"{WHERE}belongs to another key than lora-pods:tlsKey; "),
    ):
        with pytest.raises(UserError) as caught:
            read(tmp_path, given, given_key)
        assert str(caught.value).startswith(told)
        assert given_key.splitlines()[1] not in str(caught.value)
    with pytest.raises(UserError, match=r"tls\.certificate: gone\.pem: cannot be read"):
        read_tls(tmp_path / "gone.pem", "gone.pem", key)


@pytest.mark.parametrize(
    ("days", "told"),
    [
        (5, "tls.certificate: tls/acme.pem is valid until {:%Y-%m-%d} only; renew it"),
        (-1, "tls.certificate: tls/acme.pem was valid until {:%Y-%m-%d}: clients refuse it; renew it"),
    ],
)
def test_one_that_ends_soon_or_is_over_is_a_warning(tmp_path: Path, days: float, told: str) -> None:
    over = datetime.now(timezone.utc) + timedelta(days=days)
    certificate, key = self_signed("acme", days=days)
    (tmp_path / "acme.pem").write_text(certificate)
    tls = read_tls(tmp_path / "acme.pem", "acme.pem", key)
    assert list(warnings_of(tls, "tls/acme.pem")) == [told.format(over)]


def test_one_that_does_not_count_yet_is_a_warning(tmp_path: Path) -> None:
    certificate, key = self_signed("acme", days=450)
    (tmp_path / "acme.pem").write_text(certificate)
    begins = datetime.now(timezone.utc) + timedelta(days=50)
    assert list(warnings_of(read_tls(tmp_path / "acme.pem", "acme.pem", key), "tls/acme.pem")) == [
        f"tls.certificate: tls/acme.pem is valid from {begins:%Y-%m-%d} on: clients refuse it until then"
    ]
