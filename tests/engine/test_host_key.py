"""Host keys in a real stack: one that is made for a pod, and one that is not the pinned one any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.core.ssh_key import shown_key
from tests.engine.conftest import BASE, Client
from tests.support.machines import Machine, generate_key
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


def test_another_machine_behind_the_address_is_told_nothing(deployed: Client, machine: Machine) -> None:
    """After it was reached: what meets it first is the command plugin, whose library names neither key."""
    pinned, key = deployed.pods[0]["host"]["hostKey"], machine.keys / "ssh_host_ed25519_key"
    for half in (key, key.with_name(key.name + ".pub")):
        half.unlink()
    shown = generate_key(key)
    machine.run("/usr/local/sbin/lora-pods-keys")
    machine.run("systemctl", "restart", "ssh.service")
    before = machine.run("ls", "-la", "--time-style=full-iso", "/var/lib/lora-pods/secrets")
    other = (
        f"root@127.0.0.1:{machine.port()} shows another host key, {shown_key(shown)}, than the pinned one, "
        f"{shown_key(pinned)}"
    )

    deployed.configure(apiKey="sesame-2")
    failed = deployed.stack.up(fails=True)
    assert f"Command {BASE}-secrets" in failed.changes
    said = " ".join(failed.output.split())
    assert f"error: {other}: it is another machine, or someone is in between, and nothing was sent; if" in said
    assert machine.run("ls", "-la", "--time-style=full-iso", "/var/lib/lora-pods/secrets") == before

    # It holds nobody up, and the hook that told it, which a destroy does not have, is not missed.
    gone = " ".join(deployed.stack.destroy().output.split())
    assert f"warning: {other}, so it is forgotten as it is." in gone
