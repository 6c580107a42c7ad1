"""After destroy, a host is as it was."""

from __future__ import annotations

import pytest

from tests.engine.conftest import BASE, Client, host_pod
from tests.support.machines import Machine

pytestmark = pytest.mark.pod

TRACES = """
find / -xdev \\( -name '*lora-pods*' -o -name '*podctl*' \\) -not -path '/proc/*' | sort
systemctl list-unit-files --plain --no-legend 'lora-pods*' | sort
systemctl list-units --all --plain --no-legend 'lora-pods*' | sort
ps -eo user:32,args | grep -E 'api_server|lora-pods-|podctl' | grep -v grep | grep -v -- TRACES || true
"""


def traces(machine: Machine) -> str:
    return machine.run("bash", "-c", TRACES + "# TRACES")


def test_destroy_leaves_no_trace(client: Client, machine: Machine) -> None:
    before = traces(machine)
    client.up()
    during = traces(machine)
    assert during != before
    assert "api_server" in during
    run = client.stack.destroy()
    assert set(run.operations.values()) == {"delete"}
    assert traces(machine) == before


def test_destroy_of_two_bases_on_one_machine(client: Client, machine: Machine) -> None:
    machine.run("cp", "-r", BASE, "/models/other")
    before = traces(machine)
    client.pods.append(host_pod(machine, base="/models/other", port=8001))
    client.models[1]["base"] = "/models/other"
    client.up()
    client.stack.destroy()
    assert traces(machine) == before


def test_a_machine_that_is_gone_can_be_forgotten(deployed: Client, machine: Machine) -> None:
    """The commands of the README, since destroy cannot reach it."""
    machine.kill()
    run = deployed.stack.destroy(fails=True)
    assert "after 8 failed attempts" in run.output
    urn = f"urn:pulumi:acme::lora-pods::lora-pods:index:Deployment$lora-pods:index:GpuPod::{BASE}"
    deployed.stack.pulumi("state", "delete", urn, "--target-dependents", "--yes", "--stack", deployed.stack.name)
    deployed.stack.destroy()
    assert deployed.stack.export()["deployment"].get("resources", []) == []
