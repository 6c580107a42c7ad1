"""What is served has to apply: an adapter in whose name the base answers does not get past its deployment."""

from __future__ import annotations

import pytest

from tests.engine.conftest import BASE, Client
from tests.support.adapters import seeded_adapter
from tests.support.machines import Machine

pytestmark = pytest.mark.pod

FAULT = (
    "acme-v3 answers exactly as its base does: its tensors do not apply (names of another model?) or it is untrained; "
    "mend it, or set mayEqualBase: true for it in the stack file"
)


def test_an_adapter_that_answers_as_its_base_does_not_stay(deployed: Client, machine: Machine) -> None:
    before = {model: machine.ask(model) for model in ("acme-v1", "acme-v2")}
    unit = machine.read(f"/etc/systemd/system/{deployed.unit}")
    deployed.add("acme-v3", seed=3, config={"standin_equals_base": True})

    run = deployed.up(fails=True)

    assert f"{deployed.unit} is not kept: {FAULT}; the unit from before serves again (" in run.output
    assert "last lines of its journal" not in run.output
    assert {model: machine.ask(model) for model in before} == before
    assert machine.read(f"/etc/systemd/system/{deployed.unit}") == unit
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, *before}

    seeded_adapter(deployed.adapters / "acme-v3", seed=33)
    run = deployed.stack.up()
    assert run.changes[f"Command {BASE}-activate"] == "update"
    assert "3 adapters answer otherwise than their base" in run.output
    assert machine.ask("acme-v3")
    assert deployed.stack.up("--expect-no-changes").changes == {}


def test_one_that_may_answer_as_its_base_is_noted(client: Client, machine: Machine) -> None:
    client.add("acme-v3", seed=3, config={"standin_equals_base": True})
    assert f"{FAULT}; nothing served before it, so the unit is removed" in client.up(fails=True).output

    client.models[-1]["mayEqualBase"] = True
    run = client.up()
    assert "2 adapters answer otherwise than their base" in run.output
    assert "acme-v3 answers exactly as its base does, as mayEqualBase allows" in run.output
    assert machine.ask("acme-v3")
    assert client.stack.up("--expect-no-changes").changes == {}

    # No longer: the engine that runs is asked again, and runs on.
    pid = machine.pid(client.unit)
    del client.models[-1]["mayEqualBase"]
    assert f"{client.unit} runs on as it is, but {FAULT}" in client.up(fails=True).output
    assert machine.pid(client.unit) == pid

    client.pods[0]["engine"]["probe"] = False
    run = client.up()
    assert run.changes == {f"Command {BASE}-activate": "update"}
    assert "base does" not in run.output
    assert machine.pid(client.unit) == pid
