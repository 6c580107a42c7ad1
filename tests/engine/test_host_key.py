"""A host key in the state of a real stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod

PROGRAM = """
import pulumi
from components.pods.host_key import HostKey

key = HostKey("org/base-host-key", pulumi.ResourceOptions())
pulumi.export("public", key.public_key)
pulumi.export("used", pulumi.Output.concat("cloud-init: ", key.private_key))
"""


def test_only_its_public_half_is_readable_and_it_never_changes(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.root / "__main__.py").write_text(PROGRAM)
    stack = checkout.stack("acme")
    stack.configure([], [])
    assert stack.up().changes == {"HostKey org/base-host-key": "create"}
    public = stack.outputs()["public"]
    assert public.startswith("ssh-ed25519 AAAA")

    (recorded,) = [item for item in stack.export()["deployment"]["resources"] if item["type"].endswith(":HostKey")]
    assert recorded["outputs"]["public_key"] == public
    assert set(recorded["outputs"]["private_key"]) == {"4dabf18193072939515e22adb298388d", "ciphertext"}
    assert set(stack.export()["deployment"]["resources"][0]["outputs"]["used"]) == set(
        recorded["outputs"]["private_key"]
    )

    shown = json.loads(stack.pulumi("stack", "output", "--json", "--show-secrets", "--stack", "acme"))["used"]
    secret = shown.splitlines()[1]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert written == []

    assert stack.up().changes == {}
    stack.pulumi("refresh", "--yes", "--skip-preview", "--stack", "acme")
    assert stack.outputs()["public"] == public
    assert stack.up().changes == {}
