"""After destroy, a host is as it was."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engine.conftest import BASE, Client, host_pod
from tests.support.machines import ROOT, Machine

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


def test_machines_that_are_gone_are_forgotten(
    client: Client, machine: Machine, new_machine: Callable[[], Machine]
) -> None:
    """One whose pod left the stack file, then one that is to be destroyed."""
    other = new_machine()
    other.run("cp", "-r", BASE, "/models/other")
    client.pods.append(host_pod(other, base="/models/other", port=8001))
    client.models[1]["base"] = "/models/other"
    client.up()
    units = {base: engine["unit"] for base, engine in client.stack.outputs()["engines"].items()}

    def forgotten(base: str) -> str:
        key = units[base].removeprefix("lora-pods-").removesuffix(".service")
        return (
            f"warning: root@127.0.0.1:{ports[base]} cannot be reached for 30 s (Connection refused), so it is "
            f"forgotten as it is. Where it lives, {units[base]} serves on there, from {ROOT}; to take both off, log in "
            f"as root and run: python3 {ROOT}/bin/podctl leave --engine {key}\n"
        )

    ports = {pod["base"]: pod["host"]["port"] for pod in client.pods}
    machine.kill()
    client.pods = [pod for pod in client.pods if pod["base"] != BASE]
    client.models[0]["base"] = "/models/other"
    began = time.monotonic()
    run = client.up()
    assert time.monotonic() - began < 120
    assert run.output.count(forgotten(BASE)) == 2, "as it happens, and among the diagnostics"
    assert {op for name, op in run.operations.items() if BASE in name} == {"delete"}
    assert other.ask("acme-v1", port=8001)

    other.kill()
    run = client.stack.destroy()
    assert run.output.count(forgotten("/models/other")) == 2
    assert client.stack.export()["deployment"].get("resources", []) == []
