"""What must not be a change: nothing is read, nothing is sent, nothing restarts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import BASE, Client, Key
from tests.support.machines import ROOT, Machine
from tests.support.stacks import Checkout, Stack

pytestmark = pytest.mark.pod


def opened_weights(stack: Stack) -> list[str]:
    """The opens of any adapter's weights during a preview that finds no change."""
    words = ("preview", "--stack", stack.name, "--expect-no-changes")
    lines = stack.traced("open,openat,openat2", *words)[0].splitlines()
    assert any("__main__.py" in line for line in lines), "the trace does not reach into the program"
    return [line for line in lines if "adapter_model.safetensors" in line]


def test_a_second_up_changes_nothing_and_a_second_preview_reads_no_weights(deployed: Client) -> None:
    assert deployed.stack.up("--expect-no-changes").changes == {}
    assert opened_weights(deployed.stack) == []
    shutil.rmtree(deployed.stack.checkout.environment["XDG_CACHE_HOME"])
    assert len(opened_weights(deployed.stack)) >= 2, "without its memory of digests it has to read them"


def test_the_providers_are_asked_for_before_anything_is_declared(deployed: Client, tmp_path: Path) -> None:
    environment = deployed.stack.checkout.environment
    log = tmp_path / "calls"
    environment["PULUMI_DEBUG_GRPC"] = str(log)
    try:
        deployed.stack.preview("--expect-no-changes")
    finally:
        del environment["PULUMI_DEBUG_GRPC"]
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    begun = [call for call in calls if call["progress"] == "request_started"]
    asked = [(call["method"].rpartition("/")[2], (call["request"] or {}).get("tok")) for call in begun]
    assert asked.index(("Invoke", "pulumi-python:dynamic:none")) < asked.index(("RegisterResource", None))
    kinds = [resource["type"] for resource in deployed.stack.export()["deployment"]["resources"]]
    assert kinds.count("pulumi:providers:pulumi-python") == 1, "it is the resources' own provider"


def test_the_same_weights_from_elsewhere_are_no_change(deployed: Client, tmp_path: Path) -> None:
    """Another checkout, under another path and home, with the files of another user, modes, times and litter."""
    backend = Path(deployed.stack.checkout.environment["PULUMI_BACKEND_URL"].removeprefix("file://"))
    other = Checkout.make(tmp_path / "Users" / "b" / "lora-pods", backend)
    shutil.copy(deployed.stack.file, other.root / "stacks" / deployed.stack.file.name)
    elsewhere = tmp_path / "elsewhere"
    for source in sorted(deployed.adapters.iterdir()):
        target = elsewhere / f"copy-of-{source.name}"
        target.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copyfile(file, target / file.name)
            (target / file.name).chmod(0o640)
            os.utime(target / file.name, (1_000_000_000, 1_000_000_000))
            if os.geteuid() == 0:
                os.chown(target / file.name, 1000830000, 1000830000)
        (target / ".DS_Store").write_bytes(b"litter")
        (target / "optimizer.pt").write_bytes(b"state")
    models = [{**m, "adapter": f"../../../../elsewhere/copy-of-{m['id']}"} for m in deployed.models]
    stack = Stack(other, deployed.stack.name)
    stack.configure(deployed.pods, models)
    run = stack.preview("--expect-no-changes")
    assert run.changes == {}
    assert len(run.operations) >= 11


def test_reordering_the_stack_file_is_no_change(deployed: Client) -> None:
    deployed.models.reverse()
    deployed.models[:] = [dict(reversed(list(model.items()))) for model in deployed.models]
    deployed.configure()
    assert deployed.stack.preview("--expect-no-changes").changes == {}


def test_a_rotated_ssh_key_sends_nothing_and_restarts_nothing(
    deployed: Client, machine: Machine, new_key: Callable[[], Key]
) -> None:
    unit = deployed.unit
    pid = machine.pid(unit)
    blobs = machine.run("find", f"{ROOT}/blobs", "-printf", "%p %i %C@\n")
    rotated = new_key()
    machine.authorize(rotated.public)
    deployed.configure(sshPrivateKey=rotated.private)

    run = deployed.stack.up()

    assert run.changes == {
        f"Command {BASE}-{verb}": "update" for verb in ("prepare", "place", "secrets", "activate")
    }, "the key is an input of the commands alone"
    assert machine.pid(unit) == pid
    assert machine.run("find", f"{ROOT}/blobs", "-printf", "%p %i %C@\n") == blobs
    assert machine.ask("acme-v1").startswith("model=acme-v1 ")
    assert deployed.stack.up("--expect-no-changes").changes == {}
