"""One stack per client: two of them, each with a pod of its own, from one checkout and at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.support.adapters import seeded_adapter
from tests.support.machines import ROOT, Machine
from tests.support.stacks import Checkout, Stack

pytestmark = pytest.mark.pod

CLIENTS = ("acme", "globex")


def new_stack(checkout: Checkout, client: str) -> None:
    lora = Path(sys.prefix, "bin/lora")
    subprocess.run([lora, "new-stack", client], cwd=checkout.root, check=True, capture_output=True)


def served(machine: Machine) -> set[str]:
    return {model["id"] for model in machine.get("/v1/models")["data"]}


def test_two_clients_side_by_side(checkout: Checkout, new_machine: Callable[[], Machine], key: Key) -> None:
    machines = {name: new_machine() for name in CLIENTS}
    clients = {}
    for seed, name in enumerate(CLIENTS):
        new_stack(checkout, name)
        made = (checkout.root / f"stacks/Pulumi.{name}.yaml").read_text(encoding="utf-8")
        stack = Stack(checkout, name)
        stack.pulumi("stack", "init", name, "--secrets-provider=passphrase")
        # What stands there already is kept, comments and all, and only added to.
        assert stack.file.read_text(encoding="utf-8").startswith(made)
        clients[name] = Client(stack, key, [host_pod(machines[name])])
        clients[name].add(f"{name}-v1", seed=seed)
        clients[name].configure(sshPrivateKey=key.private)

    with ThreadPoolExecutor() as pool:
        runs = dict(zip(CLIENTS, pool.map(lambda name: clients[name].stack.up(), CLIENTS), strict=True))

    for name in CLIENTS:
        assert runs[name].counts["create"] >= 11
        assert served(machines[name]) == {BASE, f"{name}-v1"}
        assert machines[name].run("ls", f"{ROOT}/refs").split() == [name]

    seeded_adapter(clients["acme"].adapters / "acme-v1", seed=7)
    with ThreadPoolExecutor() as pool:
        changing = pool.submit(clients["acme"].stack.up)
        waiting = pool.submit(clients["globex"].stack.preview, "--expect-no-changes")
    assert changing.result().operations["AdapterBundle acme-v1"] == "replace"
    assert waiting.result().changes == {}
    assert clients["globex"].stack.up("--expect-no-changes").changes == {}
