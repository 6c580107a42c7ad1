"""`lora rollback`: what served before serves again at once, and the next preview says what differs."""

from __future__ import annotations

import subprocess

import pytest

from tests.engine.conftest import BASE, Client
from tests.engine.test_change import served_weights, weights
from tests.engine.test_drift import lora
from tests.support.adapters import filled_adapter, seeded_adapter
from tests.support.machines import Machine

pytestmark = pytest.mark.pod

MEBIBYTES = 16


def test_what_served_before_serves_again_and_the_next_preview_shows_it(deployed: Client, machine: Machine) -> None:
    v1, old = digest(deployed), weights(deployed, "acme-v1")
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    deployed.stack.up()
    v1_retrained = digest(deployed)

    code, said = lora(deployed, "rollback", "-s", "acme", "--base", BASE)

    assert (code, said) == (
        0,
        f"{BASE} on root@127.0.0.1:{machine.port()} serves again what it served before:\n"
        f"    {BASE}  (the base)\n"
        f"  ~ acme-v1  {v1[7:19]}, was {v1_retrained[7:19]}\n"
        f"    acme-v2  {digest(deployed, 'acme-v2')[7:19]}\n"
        "The stack file of acme differs from that now: the next `pulumi up` brings back what was rolled back. To stay, "
        "change the stack file first (`git revert`); then `pulumi up` sends nothing and restarts nothing.\n"
        "`pulumi preview --diff` shows the difference.\n",
    )
    assert served_weights(machine, "acme-v1") == old
    preview = deployed.stack.preview("--diff")
    shown = [" ".join(line.split()) for line in preview.output.splitlines()]
    told = f"serves {v1[7:19]} instead of {v1_retrained[7:19]} since the rollback"
    assert f'- model acme-v1: "{told}"' in shown
    assert f"model acme-v1: {told}\n" in preview.output, "as it is told without --diff"
    assert preview.changes[f"ReachedPod {BASE}-reach"] == preview.changes[f"Command {BASE}-activate"] == "update"
    assert "AdapterBundle acme-v1" not in preview.changes
    assert lora(deployed, "status", "-s", "acme")[0] == 1

    # The next `up` brings back what was rolled back …
    deployed.stack.up()
    assert served_weights(machine, "acme-v1") == weights(deployed, "acme-v1") != old
    assert deployed.stack.up("--refresh", "--expect-no-changes").changes == {}

    # … unless what it asks for went back as well: then nothing restarts.
    assert lora(deployed, "rollback", "-s", "acme", "--base", BASE)[0] == 0
    pid = machine.pid(deployed.unit)
    seeded_adapter(deployed.adapters / "acme-v1", seed=1)
    deployed.stack.up()
    assert machine.pid(deployed.unit) == pid
    assert served_weights(machine, "acme-v1") == old
    assert deployed.stack.up("--refresh", "--expect-no-changes").changes == {}


def test_git_revert_and_up_goes_back_without_sending_a_byte(deployed: Client, machine: Machine) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=deployed.stack.checkout.root, check=True, capture_output=True)

    deployed.models.append({"id": "large", "base": BASE, "adapter": "../adapters/large"})
    filled_adapter(deployed.adapters / "large", 1, MEBIBYTES)
    deployed.up()
    first, old = digest(deployed, "large"), weights(deployed, "large")
    git("init", "--quiet")
    git("add", "adapters", "stacks")
    git("commit", "--quiet", "--message=The first one")
    filled_adapter(deployed.adapters / "large", 2, MEBIBYTES)
    deployed.models.pop(0)
    deployed.configure()
    git("commit", "--quiet", "--all", "--message=A better one, and acme-v1 left")
    before = machine.received()
    deployed.stack.up()
    assert machine.received() - before > MEBIBYTES << 20, "else this counts nothing"
    assert served_weights(machine, "large") == weights(deployed, "large") != old

    git("revert", "--no-edit", "HEAD")
    before = machine.received()
    run = deployed.stack.up()

    assert machine.received() - before < 1 << 20
    assert run.changes["AdapterBundle large"] == "replace"
    assert run.changes["AdapterBundle acme-v1"] == "create"
    assert digest(deployed, "large") == first
    assert served_weights(machine, "large") == weights(deployed, "large") == old
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, "acme-v1", "acme-v2", "large"}


def digest(client: Client, model: str = "acme-v1") -> str:
    found: str = client.stack.outputs()["engines"][BASE]["models"][model]
    return found
