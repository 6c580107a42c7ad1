"""Keys that are made here, and those that are read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import asyncssh
import pytest

from components.core.errors import UserError
from components.core.ssh_key import fingerprint, normalise_host_key, normalise_private_key
from components.pods.host_key import HostKeyProvider
from components.pods.keys import new_key, public_half
from tests.components.test_settings import PRIVATE_KEY


def test_a_host_key_is_made_once_and_nothing_changes_it(tmp_path: Path) -> None:
    provider = HostKeyProvider()
    made = provider.create({"private_key": None, "public_key": None})
    assert made.outs is not None
    private, public = made.outs["private_key"], made.outs["public_key"]
    assert made.id == fingerprint(public)
    assert normalise_host_key(public) == public
    assert public_half(private) == public
    assert asyncssh.import_private_key(private).export_public_key().decode().split() == public.split()
    again = provider.create({})
    assert again.outs is not None
    assert again.outs["private_key"] != private
    assert provider.diff(made.id, made.outs, {}).changes is False
    refreshed = provider.read(made.id, made.outs)
    assert (refreshed.id, refreshed.outs) == (made.id, made.outs)


def test_the_provider_is_found_by_module_and_name() -> None:
    """It is in every stack's state that has an EC2 pod."""
    assert f"{HostKeyProvider.__module__}.{HostKeyProvider.__qualname__}" == "components.pods.host_key.HostKeyProvider"


def test_openssh_reads_what_is_made(tmp_path: Path) -> None:
    private, public = new_key()
    path = tmp_path / "key"
    path.write_text(private)
    path.chmod(0o600)
    read = subprocess.run(["ssh-keygen", "-y", "-f", str(path)], check=True, capture_output=True, text=True).stdout
    assert read.split() == public.split()


@pytest.mark.parametrize(
    "arguments",
    [["-t", "ed25519"], ["-t", "rsa", "-b", "2048"], ["-t", "rsa", "-b", "2048", "-m", "PEM"]],
    ids=["ed25519", "rsa", "pem"],
)
def test_the_public_half_is_the_one_that_openssh_wrote(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-C", "me@here", "-f", str(path), *arguments], check=True)
    public = path.with_name("key.pub").read_text()
    assert public_half(normalise_private_key(path.read_text())) == " ".join(public.split()[:2])


@pytest.mark.parametrize(
    "text", [PRIVATE_KEY, "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n"]
)
def test_what_only_looks_like_a_key_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UserError) as caught:
        public_half(text)
    assert str(caught.value) == "lora-pods:sshPrivateKey is damaged: it has the form of a key, and is none"
