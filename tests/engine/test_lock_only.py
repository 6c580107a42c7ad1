"""A checkout that has the lock and no adapters: what it previews, what it can do, and what it says where it cannot."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import BASE, Client
from tests.support.adapters import seeded_adapter
from tests.support.machines import Machine
from tests.support.stacks import Checkout, Stack

pytestmark = pytest.mark.pod

LORA = "from components.cli.main import main; raise SystemExit(main())"


def lora_lock(stack: Stack, *words: str) -> str:
    command = [sys.executable, "-c", LORA, "lock", "-s", stack.name, *words]
    where = stack.checkout
    done = subprocess.run(command, cwd=where.root, env=where.environment, capture_output=True, text=True, check=True)
    return done.stdout


def pull(laptop: Stack, other: Stack) -> None:
    """What git brings: the stack file and the lock, and no adapter."""
    for name in (laptop.file.name, f"{laptop.name}.lock.yaml"):
        shutil.copy(laptop.checkout.root / "stacks" / name, other.checkout.root / "stacks" / name)
    assert not (other.checkout.root / "adapters").exists()


def details(stack: Stack) -> list[dict[str, Any]]:
    """All that the last operation's events say of each resource: operation, inputs old and new, and the diff."""
    events = map(
        json.loads, (stack.checkout.root / f"events-{stack.name}.jsonl").read_text(encoding="utf-8").splitlines()
    )
    found = [event["resourcePreEvent"]["metadata"] for event in events if "resourcePreEvent" in event]
    return sorted(found, key=lambda metadata: (metadata["urn"], metadata["op"]))


def sha256(client: Client, model: str) -> str:
    return hashlib.sha256((client.adapters / model / "adapter_model.safetensors").read_bytes()).hexdigest()


def served(machine: Machine, model: str) -> str:
    return machine.ask(model).split("weights=")[1].split()[0]


@pytest.fixture
def second(deployed: Client, tmp_path: Path) -> Stack:
    """Another machine's checkout, of the same state, after the laptop deployed and locked."""
    lora_lock(deployed.stack)
    backend = Path(deployed.stack.checkout.environment["PULUMI_BACKEND_URL"].removeprefix("file://"))
    stack = Stack(Checkout.make(tmp_path / "ci" / "checkout", backend), deployed.stack.name)
    pull(deployed.stack, stack)
    return stack


def test_a_change_is_the_same_with_and_without_the_bytes(deployed: Client, second: Stack, machine: Machine) -> None:
    run = second.preview("--expect-no-changes")
    assert run.changes == {}
    assert "acme.lock.yaml stands in for adapters that are not on this machine: acme-v1, acme-v2" in run.output

    seeded_adapter(deployed.adapters / "acme-v1", seed=11, rank=16)
    lock = deployed.stack.checkout.root / "stacks" / "acme.lock.yaml"
    old = lock.read_text()
    told = lora_lock(deployed.stack)
    assert "  ~ acme-v1  " in told
    assert "acme-v2" not in told
    pull(deployed.stack, second)
    on_laptop, without_bytes = deployed.stack.preview(), second.preview()
    assert on_laptop.changes["AdapterBundle acme-v1"] == "replace"
    assert without_bytes.operations == on_laptop.operations
    assert details(second) == details(deployed.stack)
    digest = next(line for line in lock.read_text().splitlines() if "digest" in line).split()[1]
    assert any(digest in json.dumps(each["new"]) for each in details(second)), "the diff is about the new digest"

    failed = second.up(fails=True).output
    assert f"the pod lacks what is not on this machine either: acme-v1 ({digest}) at ../adapters/" in failed
    assert "or run `pulumi up` once from a machine that has it" in failed
    assert "Traceback" not in failed
    assert served(machine, "acme-v1") != sha256(deployed, "acme-v1")

    deployed.stack.up()
    assert served(machine, "acme-v1") == sha256(deployed, "acme-v1")
    assert second.up("--expect-no-changes").changes == {}

    # Back to what the pod still holds: the lock as it was is enough.
    (second.checkout.root / "stacks" / "acme.lock.yaml").write_text(old)
    assert second.up().changes["AdapterBundle acme-v1"] == "replace"
    seeded_adapter(deployed.adapters / "acme-v1", seed=1)
    assert served(machine, "acme-v1") == sha256(deployed, "acme-v1")
    assert deployed.stack.preview("--expect-no-changes").changes == {}


def test_up_without_bytes_onto_a_pod_that_has_them(
    deployed: Client, second: Stack, machine: Machine, tmp_path: Path
) -> None:
    """The state is lost, and so are the adapters: the pod and the lock are enough."""
    pid = machine.pid(deployed.unit)
    fresh = Checkout.make(tmp_path / "fresh" / "checkout", tmp_path / "fresh" / "backend").stack(second.name)
    fresh.configure(deployed.pods, deployed.models, sshPrivateKey=deployed.key.private)
    shutil.copy(second.checkout.root / "stacks" / "acme.lock.yaml", fresh.checkout.root / "stacks")
    fresh.up()
    assert fresh.outputs()["engines"][BASE]["models"] == deployed.stack.outputs()["engines"][BASE]["models"]
    assert served(machine, "acme-v1") == sha256(deployed, "acme-v1")
    assert machine.pid(deployed.unit) == pid
    assert fresh.up("--expect-no-changes").changes == {}


def test_a_lock_that_is_required(client: Client) -> None:
    client.stack.pulumi("config", "set", "requireLock", "true", "--stack", client.stack.name)
    refused = client.stack.preview(fails=True)
    assert "requireLock: there is no stacks/acme.lock.yaml; write it with `lora lock -s acme`" in refused.output
    assert refused.changes == {}
    lora_lock(client.stack)
    assert client.stack.preview().changes["AdapterBundle acme-v1"] == "create"
    seeded_adapter(client.adapters / "acme-v2", seed=22)
    refused = client.stack.preview(fails=True)
    assert "requireLock: stacks/acme.lock.yaml says otherwise of an adapter: acme-v2 " in refused.output
    assert refused.changes == {}
    client.stack.pulumi("config", "set", "requireLock", "false", "--stack", client.stack.name)
    warned = client.stack.preview()
    assert "stacks/acme.lock.yaml says otherwise of an adapter: acme-v2 " in warned.output
    assert warned.changes["AdapterBundle acme-v2"] == "create"
