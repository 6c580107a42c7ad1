"""What `pulumi preview` shows of a change, in its default display: the text that a pull request's comment holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.support.adapters import seeded_adapter
from tests.support.machines import Machine
from tests.support.stacks import Run

pytestmark = pytest.mark.pod

NOTHING = [f"{BASE}: 2 adapters, nothing changes"]
FLAGS = [
    "  --max-loras 2: 2 adapters, all may share a batch",
    "  --max-lora-rank 8: largest rank is 8 (acme-v1)",
    "  --max-cpu-loras 2: 2 adapters, all stay in CPU memory",
]


def said(run: Run) -> list[str]:
    """What the program says of its pods: the lines of the deployment's block among the diagnostics."""
    _, found, block = run.output.partition("\n  lora-pods:index:Deployment (lora-pods):\n")
    return [line.removeprefix("    ") for line in block.split("\n\n")[0].splitlines()] if found else []


def outputs_shown(run: Run) -> bool:
    return "\nOutputs:\n" in run.output


def digest(client: Client, model: str) -> str:
    """The digest that is served for a model, as the preview writes it."""
    return str(client.stack.outputs()["engines"][BASE]["models"][model])[7:19]


def test_a_first_deployment_and_nothing_to_do_after_it(client: Client) -> None:
    first = said(client.stack.preview())
    up = client.stack.up()

    added = [f"  + {model} {digest(client, model)}" for model in ("acme-v1", "acme-v2")]
    assert first == [f"{BASE}: 2 adapters, 2 added", *added, *FLAGS, "  the engine starts for the first time"]
    assert said(up) == [], "what was to change is told before it changes, once"
    again = client.stack.preview("--expect-no-changes")
    assert said(again) == NOTHING
    assert not outputs_shown(again)
    assert said(client.stack.preview("--refresh", "--expect-no-changes")) == NOTHING

    client.stack.destroy()
    assert said(client.stack.preview()) == first


def test_an_adapter_changed_one_removed_and_one_that_raises_the_largest_rank(deployed: Client) -> None:
    old = {model: digest(deployed, model) for model in ("acme-v1", "acme-v2")}
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    del deployed.models[1]
    deployed.add("acme-v3", seed=3)
    seeded_adapter(deployed.adapters / "acme-v3", seed=3, rank=64)
    deployed.configure()

    preview = deployed.stack.preview()
    refreshed = deployed.stack.preview("--refresh")
    # With both of its phases, as a person runs it.
    up = deployed.stack.pulumi("up", "--yes", "--stack", deployed.stack.name, "--color=never")

    assert said(preview) == [
        f"{BASE}: 2 adapters, 1 changed, 1 added, 1 removed",
        f"  ~ acme-v1 {old['acme-v1']} → {digest(deployed, 'acme-v1')}",
        f"  + acme-v3 {digest(deployed, 'acme-v3')}",
        f"  - acme-v2 {old['acme-v2']}",
        "  --max-loras 2: 2 adapters, all may share a batch",
        "  --max-lora-rank 64 (was 8): largest rank is 64 (acme-v3)",
        "  --max-cpu-loras 2: 2 adapters, all stay in CPU memory",
        "  the engine restarts: adapters, flags changed",
    ]
    assert said(refreshed) == said(preview)
    assert up.count("  the engine restarts: adapters, flags changed\n") == 1
    assert said(deployed.stack.preview()) == NOTHING


def test_one_of_a_hundred_and_all_of_them(client: Client, machine: Machine) -> None:
    for number in range(3, 101):
        client.add(f"acme-v{number}", seed=number)
    client.up()
    old = digest(client, "acme-v57")
    seeded_adapter(client.adapters / "acme-v57", seed=1057)

    preview = client.stack.preview()

    assert len(preview.output) < 8000
    lines = said(preview)
    assert lines[0] == f"{BASE}: 100 adapters, 1 changed"
    assert lines[1].startswith(f"  ~ acme-v57 {old} → ")
    assert lines[2:] == [
        "  --max-loras 8: 100 adapters, capped at 8 for memory",
        "  --max-lora-rank 8: largest rank is 8 (acme-v1)",
        "  --max-cpu-loras 100: 100 adapters, all stay in CPU memory",
        "  the engine restarts: adapters changed",
    ]
    for other in ("acme-v56", "acme-v58"):
        assert other not in preview.output
    assert not outputs_shown(preview), "they name all hundred"

    for number in range(1, 101):
        seeded_adapter(client.adapters / f"acme-v{number}", seed=2000 + number)
    lines = said(client.stack.preview())
    assert lines[0] == f"{BASE}: 100 adapters, 100 changed"
    assert lines[13:14] == ["  and 88 more"]
    assert len(lines) == 18


def test_after_a_failed_up_it_compares_with_what_runs(deployed: Client, machine: Machine) -> None:
    recorded, pid = deployed.stack.outputs(), machine.pid(deployed.unit)
    old = digest(deployed, "acme-v1")
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    deployed.pods[0]["engine"].update(args={"noSuchFlag": 1}, readyTimeoutSeconds=10)
    deployed.configure()
    for how in ((), ("--continue-on-error",)):
        deployed.stack.up(*how, fails=True)
        assert {**deployed.stack.outputs()["engines"][BASE], "models": None} == {
            **recorded["engines"][BASE],
            "models": None,
        }
    assert machine.pid(deployed.unit) != pid, "what ran before was put back"

    del deployed.pods[0]["engine"]["args"]
    deployed.configure()
    lines = said(deployed.stack.preview())

    assert lines[0] == f"{BASE}: 2 adapters, 1 changed"
    assert lines[1].startswith(f"  ~ acme-v1 {old} → ")
    assert lines[-1] == "  the engine restarts: adapters changed"


def test_a_failure_on_one_pod_says_nothing_of_another(client: Client, machine: Machine) -> None:
    machine.run("cp", "-r", BASE, "/models/other")
    client.pods.append(host_pod(machine, base="/models/other", port=8001, readyTimeoutSeconds=10))
    client.models[1]["base"] = "/models/other"
    client.up()
    for model in ("acme-v1", "acme-v2"):
        seeded_adapter(client.adapters / model, seed=11)
    client.pods[1]["engine"]["args"] = {"noSuchFlag": 1}
    client.configure()
    client.stack.up("--continue-on-error", fails=True)

    lines = said(client.stack.preview())
    assert lines[:2] == [f"{BASE}: 1 adapter, nothing changes", "/models/other: 1 adapter, 1 changed"]

    client.pods.pop()
    client.models.pop()
    client.configure()
    assert said(client.stack.preview()) == [
        f"{BASE}: 1 adapter, nothing changes",
        "/models/other: no longer in the stack file; its engine and what it serves are removed",
    ]


def test_what_restarts_an_engine_besides_adapters(
    deployed: Client, machine: Machine, new_key: Callable[[], Key]
) -> None:
    none = f"{BASE}: 2 adapters, none changes"
    deployed.pods[0]["engine"]["maxLoras"] = 1
    deployed.configure()
    assert said(deployed.stack.preview()) == [
        none,
        "  --max-loras 1 (was 2): engine.maxLoras",
        *FLAGS[1:],
        "  the engine restarts: flags changed",
    ]
    deployed.pods[0]["engine"].pop("maxLoras")

    deployed.pods[0]["engine"]["env"] = {"SOME": "thing"}
    deployed.configure()
    assert said(deployed.stack.preview()) == [none, *FLAGS, "  the engine restarts: unit changed"]
    deployed.pods[0]["engine"].pop("env")

    deployed.pods[0]["engine"]["readyTimeoutSeconds"] = 61
    deployed.configure()
    pid = machine.pid(deployed.unit)
    assert said(deployed.stack.preview()) == [f"{none}; the engine goes on"]
    deployed.stack.up()
    assert machine.pid(deployed.unit) == pid

    deployed.configure(apiKey="CANARY-API")
    preview = deployed.stack.preview()
    assert said(preview) == [none, *FLAGS, "  the engine restarts: secrets changed"]
    deployed.stack.up()
    assert "CANARY" not in preview.output + str(deployed.stack.outputs())
    assert machine.pid(deployed.unit) != pid

    pid = machine.pid(deployed.unit)
    rotated = new_key()
    machine.authorize(rotated.public)
    deployed.configure(sshPrivateKey=rotated.private)
    assert said(deployed.stack.preview()) == [f"{none}; the engine goes on, unless a secret changed"]
    deployed.stack.up()
    assert machine.pid(deployed.unit) == pid
    assert said(deployed.stack.preview()) == NOTHING


def test_a_run_limited_to_other_resources_records_nothing_that_does_not_run(deployed: Client) -> None:
    recorded = deployed.stack.outputs()
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    deployed.stack.up("--target", "**acme-v1")
    outputs = deployed.stack.outputs()
    assert outputs["engines"][BASE]["unitSha256"] == recorded["engines"][BASE]["unitSha256"]
    assert said(deployed.stack.preview())[-1] == "  the engine restarts: adapters changed"
