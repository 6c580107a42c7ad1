"""When it cannot work: the reason is told in plain words, and what served goes on serving."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from components.core.ssh_key import shown_key
from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.support.adapters import seeded_adapter
from tests.support.machines import ROOT, Machine, generate_key, wait_for

pytestmark = pytest.mark.pod


def test_an_engine_that_does_not_start_leaves_the_last_good_one_serving(deployed: Client, machine: Machine) -> None:
    before = machine.ask("acme-v1")
    unit_text = machine.read(f"/etc/systemd/system/{deployed.unit}")
    seeded_adapter(deployed.adapters / "acme-v2", seed=22, config={"standin_fail": "no such tensor: q_prj"})

    run = deployed.stack.up(fails=True)

    assert "ValueError: no such tensor: q_prj" in run.output
    assert "Traceback" not in run.output.split("Diagnostics:")[0]
    assert machine.ask("acme-v1") == before
    assert machine.read(f"/etc/systemd/system/{deployed.unit}") == unit_text
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, "acme-v1", "acme-v2"}

    seeded_adapter(deployed.adapters / "acme-v2", seed=23)
    assert deployed.stack.up().changes[f"Command {BASE}-activate"] == "update"
    assert deployed.stack.up("--expect-no-changes").changes == {}


def test_a_first_engine_that_does_not_start_leaves_none(client: Client, machine: Machine) -> None:
    seeded_adapter(client.adapters / "acme-v1", config={"standin_fail": "out of memory"})
    run = client.up(fails=True)
    assert "ValueError: out of memory" in run.output
    assert machine.run("systemctl", "list-units", "--all", "--plain", "--no-legend", "lora-pods-acme-*") == ""
    assert client.stack.destroy().counts["delete"] > 0
    assert machine.run("ls", "-A", ROOT, check=False) == ""


def test_a_machine_with_another_host_key(client: Client, machine: Machine) -> None:
    client.pods[0]["host"]["hostKey"] = pinned = generate_key(client.stack.checkout.root / "other-host-key")
    run = client.up(fails=True)
    keys = f"another host key, {shown_key(machine.host_key)}, than the pinned one, {shown_key(pinned)}: it is another"
    assert keys in " ".join(run.output.split())
    assert "Traceback" not in run.output
    assert f"Command {BASE}-prepare" not in run.operations, "nothing is said to a machine nobody vouched for"


def test_a_key_that_is_refused(client: Client, new_key: Callable[[], Key]) -> None:
    client.configure(sshPrivateKey=new_key().private)
    run = client.stack.up(fails=True)
    assert "refuses the SSH key: put its public half into ~root/.ssh/authorized_keys there" in run.output
    assert "Traceback" not in run.output


def test_a_pod_that_lacks_what_the_engine_needs_is_told_all_of_it_before_anything_is_sent(
    client: Client, machine: Machine
) -> None:
    client.pods[0]["engine"] |= {"python": "/opt/nowhere/bin/python", "device": "gpu", "diskGiB": 1_000_000.0}
    run = client.up(fails=True)
    for said in ("/opt/nowhere/bin/python", "nvidia-smi", "1000000"):
        assert said in run.output
    assert machine.run("ls", "-A", f"{ROOT}/blobs", check=False) == ""


def test_faults_of_the_stack_file_are_told_together_without_a_traceback(client: Client) -> None:
    client.models.append({"id": "acme-v1", "base": "org/absent", "adapter": "../adapters/nowhere"})
    client.pods.append(host_pod(machine_of(client), base="org/b"))
    client.configure()
    run = client.stack.preview(fails=True)
    assert "Traceback" not in run.output
    assert "the stack has 4 faults; nothing was touched:" in run.output
    for fault in (
        "pods[1].engine.port: 8000 on 127.0.0.1 is taken by pods[0]",
        "models[2].id: acme-v1 is also models[0]",
        "models[2].base: no pod serves org/absent",
        "adapters/nowhere: no such directory",
    ):
        assert fault in run.output
    assert run.operations == {}


def machine_of(client: Client) -> Machine:
    port = client.pods[0]["host"]["port"]

    class Same(Machine):
        def port(self, inside: int = 22) -> int:
            return int(port)

    return Same("", client.pods[0]["host"]["hostKey"], client.adapters)


def test_an_interrupted_activation_leaves_what_served_before(deployed: Client, machine: Machine) -> None:
    """Pulumi forgets an activation that it did not see the end of, so going back is no diff."""
    before = machine.ask("acme-v1")
    old = dict(deployed.pods[0]["engine"])
    deployed.pods[0]["engine"] = {**old, "maxModelLen": 99, "env": {"STANDIN_START_SECONDS": "20"}}
    deployed.configure()
    unit = f"/etc/systemd/system/{deployed.unit}"

    with deployed.stack.started("up", "--yes", "--skip-preview") as pulumi:
        wait_for(lambda: "--max-model-len" in machine.read(unit))
        pulumi.send_signal(signal.SIGINT)
        pulumi.wait(timeout=60)

    wait_for(lambda: "--max-model-len" not in machine.read(unit))
    deployed.pods[0]["engine"] = old
    assert deployed.up().changes == {}
    health = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:8000/health")
    wait_for(lambda: machine.run(*health, check=False) == "200")
    assert machine.ask("acme-v1") == before


def test_a_refresh_mends_a_pod_that_was_tampered_with(deployed: Client, machine: Machine) -> None:
    unit = deployed.unit
    served = machine.ask("acme-v1")
    blob = machine.run("ls", f"{ROOT}/blobs/sha256").split()[0]
    for harm in (
        ("systemctl", "disable", "--now", unit),
        ("sed", "-i", "s/^Restart=.*/Restart=no/", f"/etc/systemd/system/{unit}"),
        ("rm", "-rf", f"{ROOT}/blobs/sha256/{blob}"),
    ):
        machine.run(*harm)
        assert deployed.stack.up("--refresh").changes[f"ReachedPod {BASE}-reach"] == "update", harm
        assert machine.ask("acme-v1") == served
        assert machine.show(unit, "UnitFileState", "ActiveState") == {
            "UnitFileState": "enabled",
            "ActiveState": "active",
        }
    assert deployed.stack.up("--refresh", "--expect-no-changes").changes == {}
