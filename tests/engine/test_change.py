"""What changes when something did: exactly that, and what depends on it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable

import pytest

from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.support.adapters import seeded_adapter
from tests.support.machines import ROOT, Machine

pytestmark = pytest.mark.pod

PLACING = {f"BundleUpload {BASE}-upload": "update", f"Command {BASE}-place": "update"}
ENGINE = {f"Command {BASE}-activate": "update"}


def served_weights(machine: Machine, model: str) -> str:
    """The SHA-256 of the weights that the stand-in engine loaded for a model."""
    return machine.ask(model).split("weights=")[1].split()[0]


def weights(client: Client, model: str) -> str:
    return hashlib.sha256((client.adapters / model / "adapter_model.safetensors").read_bytes()).hexdigest()


def test_an_adapter_retrained_in_place(deployed: Client, machine: Machine) -> None:
    path = deployed.adapters / "acme-v1" / "adapter_model.safetensors"
    before, old = path.stat(), served_weights(machine, "acme-v1")
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size

    assert deployed.stack.preview().changes == {"AdapterBundle acme-v1": "replace", **PLACING, **ENGINE}
    run = deployed.stack.up()

    assert run.changes == {"AdapterBundle acme-v1": "replace", **PLACING, **ENGINE}
    assert run.operations["AdapterBundle acme-v2"] == "same"
    assert served_weights(machine, "acme-v1") == weights(deployed, "acme-v1") != old
    assert served_weights(machine, "acme-v2") == weights(deployed, "acme-v2")


def test_two_ids_with_the_same_bytes(client: Client, machine: Machine) -> None:
    client.add("acme-v3", seed=2)
    client.up()
    assert len(machine.run("ls", f"{ROOT}/blobs/sha256").split()) == 2
    assert served_weights(machine, "acme-v2") == served_weights(machine, "acme-v3") == weights(client, "acme-v2")

    del client.models[1]
    run = client.up()

    assert run.changes == {"AdapterBundle acme-v2": "delete", **PLACING, **ENGINE}
    assert served_weights(machine, "acme-v3") == weights(client, "acme-v3")
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, "acme-v1", "acme-v3"}
    assert sorted(machine.run("ls", f"{ROOT}/refs/acme").split()) == ["acme-v1", "acme-v3"]


def test_a_re_rented_pod(deployed: Client, machine: Machine, new_machine: Callable[[], Machine]) -> None:
    fresh = new_machine()
    machine.kill()
    deployed.pods[0] = host_pod(fresh)

    run = deployed.up()

    commands = {f"Command {BASE}-{verb}": "update" for verb in ("prepare", "place", "secrets", "activate")}
    others = {f"ReachedPod {BASE}-reach": "update", f"BundleUpload {BASE}-upload": "update"}
    assert run.changes == {**commands, **others}
    for model in ("acme-v1", "acme-v2"):
        assert served_weights(fresh, model) == weights(deployed, model)
    assert deployed.stack.preview("--expect-no-changes").changes == {}


@pytest.mark.parametrize("verb", ["activate", "secrets", "place", "prepare"])
def test_a_forced_replacement_does_not_undo_itself(deployed: Client, machine: Machine, verb: str) -> None:
    run = deployed.stack.up("--replace", f"**{BASE}-{verb}")
    assert run.operations[f"Command {BASE}-{verb}"] == "replace"
    assert served_weights(machine, "acme-v1") == weights(deployed, "acme-v1")
    deployed.configure(apiKey="set after it")
    deployed.stack.up()
    assert machine.get("/v1/models", {"Authorization": "Bearer set after it"})["data"]


def test_a_pod_that_was_emptied_is_filled_again_by_a_refresh(deployed: Client, machine: Machine) -> None:
    machine.run("systemctl", "stop", deployed.unit)
    machine.run("rm", "-rf", ROOT, f"/etc/systemd/system/{deployed.unit}")
    machine.run("systemctl", "daemon-reload")
    run = deployed.stack.up("--refresh")
    assert run.changes[f"ReachedPod {BASE}-reach"] == "update"
    assert served_weights(machine, "acme-v1") == weights(deployed, "acme-v1")
    assert deployed.stack.up("--refresh", "--expect-no-changes").changes == {}


def test_a_changed_secret_restarts_the_engine_with_it(deployed: Client, machine: Machine) -> None:
    pid = machine.pid(deployed.unit)
    deployed.configure(apiKey="first key")
    run = deployed.stack.up()
    assert run.changes == {f"Command {BASE}-secrets": "update", **ENGINE}
    assert machine.pid(deployed.unit) != pid
    with pytest.raises(AssertionError, match="401"):
        machine.get("/v1/models")
    assert machine.get("/v1/models", {"Authorization": "Bearer first key"})["data"]


def test_a_base_under_another_name_takes_over_the_port(deployed: Client, machine: Machine) -> None:
    old = deployed.unit
    machine.run("cp", "-r", BASE, "/models/renamed")
    deployed.pods[0] = {**deployed.pods[0], "base": "/models/renamed"}
    deployed.models[:] = [{**model, "base": "/models/renamed"} for model in deployed.models]

    deployed.up()

    assert deployed.unit != old
    assert machine.show(old, "ActiveState", "LoadState") == {"ActiveState": "inactive", "LoadState": "not-found"}
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {"/models/renamed", "acme-v1", "acme-v2"}
    assert served_weights(machine, "acme-v1") == weights(deployed, "acme-v1")


def test_another_user_with_sudo(client: Client, machine: Machine, key: Key) -> None:
    client.pods[0] = host_pod(machine, user="ops")
    client.up()
    assert served_weights(machine, "acme-v1") == weights(client, "acme-v1")
    client.stack.destroy()
    assert machine.run("ls", "-A", ROOT, check=False) == ""


def test_two_bases_on_one_machine(client: Client, machine: Machine) -> None:
    machine.run("cp", "-r", BASE, "/models/other")
    client.pods.append(host_pod(machine, base="/models/other", port=8001))
    client.models[1]["base"] = "/models/other"
    client.up()
    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, "acme-v1"}
    assert {model["id"] for model in machine.get("/v1/models", port=8001)["data"]} == {"/models/other", "acme-v2"}
    client.pods.pop()
    client.models.pop()
    client.up()
    assert served_weights(machine, "acme-v1") == weights(client, "acme-v1")
    units = machine.run("systemctl", "list-units", "--all", "--plain", "--no-legend", "lora-pods-acme-*")
    assert [line.split()[0] for line in units.splitlines()] == [client.unit]


def test_a_vllm_installed_on_the_pod(client: Client, machine: Machine) -> None:
    client.pods[0]["engine"].pop("python")
    client.pods[0]["engine"]["vllm"] = {"version": "0.33.0"}
    client.up()
    python = f"{ROOT}/venvs/vllm-0.33.0/bin/python"
    assert machine.argv(machine.pid(client.unit))[0] == python
    made = machine.run("stat", "--format=%i %Z", python)
    client.pods[0]["engine"]["maxModelLen"] = 128
    client.up()
    assert machine.run("stat", "--format=%i %Z", python) == made, "it is installed once"


def test_a_machine_with_host_keys_of_every_kind(client: Client, machine: Machine) -> None:
    """The command plugin's SSH library asks for ECDSA first, whatever kind was pinned."""
    for kind in ("ecdsa", "rsa"):
        machine.run("ssh-keygen", "-q", "-t", kind, "-N", "", "-f", f"/etc/ssh/ssh_host_{kind}_key")
    lines = "".join(f"HostKey /etc/ssh/ssh_host_{kind}_key\n" for kind in ("rsa", "ecdsa"))
    machine.run("tee", "/etc/ssh/sshd_config.d/kinds.conf", stdin=lines)
    machine.run("systemctl", "restart", "ssh")
    scanned = subprocess.run(
        ["ssh-keyscan", "-p", str(machine.port()), "127.0.0.1"], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[1] for line in scanned.splitlines()} == {"ssh-rsa", "ecdsa-sha2-nistp256", "ssh-ed25519"}
    assert client.pods[0]["host"]["hostKey"].startswith("ssh-ed25519 ")
    client.up()
    assert served_weights(machine, "acme-v1") == weights(client, "acme-v1")
