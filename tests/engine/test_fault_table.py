"""What goes wrong where people bring adapters to a machine by other means, row by row, and what happens here instead.

One deployment goes through all of it; each row begins with a pod that is as it should be, and leaves it so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.engine.test_change import ENGINE, PLACING, served_weights, weights
from tests.engine.test_drift import refreshed
from tests.engine.test_preview import digest, said
from tests.support.adapters import filled_adapter, seeded_adapter
from tests.support.machines import ROOT, Machine, call, container_engine, generate_key, wait_for
from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod

BLOBS, STAGING = f"{ROOT}/blobs/sha256", f"{ROOT}/staging"
MIB = 1 << 20
LARGE = 48
# Looks at the blobs until it is told to stop: how often, and in which states each of them was ever seen.
READER = """
import json, os, sys
blobs, looks, seen = sys.argv[1], 0, {}
print("begins", flush=True)
while not os.path.exists("/run/enough"):
    looks += 1
    for blob in os.listdir(blobs):
        state = []
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            try:
                with open(os.path.join(blobs, blob, name), "rb") as file:
                    size = file.seek(0, 2)
                    file.seek(-1, 2)
                    state.append([size, file.read(1)[0]])
            except OSError as error:
                state.append(str(error))
        if state not in seen.setdefault(blob, []):
            seen[blob].append(state)
print(json.dumps([looks, seen]))
"""
# Waits until a file is so large and says something, and has podctl's verb do no more.
HOLDER = """
import glob, os, signal, sys
verb, pattern, size, text = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()
def there():
    return [p for p in glob.glob(pattern) if os.stat(p).st_size >= size and (not text or text in open(p, "rb").read())]
while not there():
    pass
for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
    if verb.encode() in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0"):
        os.kill(int(pid), signal.SIGSTOP)
print(os.stat(there()[0]).st_size)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    machine = Machine.start(directory, generate_key(directory / "key"))
    machine.run("mkdir", "-p", BASE)
    machine.run("tee", f"{BASE}/config.json", stdin="{}")
    yield machine
    machine.remove()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Client:
    directory = tmp_path_factory.mktemp("stack")
    private = (machine.keys.parent / "key").read_text()
    stack = Checkout.make(directory / "checkout", directory / "backend").stack("acme")
    client = Client(stack, Key(private, ""), [host_pod(machine)])
    client.add("acme-v1", seed=1)
    client.add("acme-v2", seed=2)
    client.models.append({"id": "large", "base": BASE, "adapter": "../adapters/large"})
    filled_adapter(client.adapters / "large", 1, LARGE)
    client.configure(sshPrivateKey=private)
    return client


@pytest.fixture(scope="module")
def deployed(client: Client) -> Client:
    client.stack.up()
    return client


def file(client: Client, model: str) -> str:
    """A model's weights on the pod."""
    return f"{BLOBS}/{client.stack.outputs()['engines'][BASE]['models'][model][7:]}/adapter_model.safetensors"


def serves_all(client: Client, machine: Machine) -> bool:
    ids = [model["id"] for model in client.models]
    return [served_weights(machine, model) for model in ids] == [weights(client, model) for model in ids]


def goes_down(client: Client, machine: Machine, verb: str, pattern: str, size: int = 0, text: str = "") -> int:
    """The pod is switched off in the middle of an `up`, as a file there says, and on again. -> the file's size"""
    with client.stack.started("up", "--yes", "--skip-preview") as pulumi:
        held = int(machine.run("python3", "-c", HOLDER, verb, pattern, str(size), text))
        machine.kill()
        machine.boot()
        assert pulumi.wait(timeout=180) != 0
    wait_for(lambda: is_up(machine))
    return held


def is_up(machine: Machine) -> bool:
    return machine.run("curl", "-sf", "http://127.0.0.1:8000/v1/models", check=False) != ""


def test_a_preview_on_an_empty_target_works(client: Client, machine: Machine) -> None:
    told = said(client.stack.preview())
    assert told[0] == f"{BASE}: 3 adapters, 3 added"
    assert told[-1] == "  the engine starts for the first time"
    assert machine.run("ls", "-A", ROOT, check=False) == ""


def test_a_reader_during_the_copy_sees_no_partial_file(deployed: Client, machine: Machine) -> None:
    filled_adapter(deployed.adapters / "large", 2, LARGE)
    command = [*container_engine(), "exec", machine.name, "python3", "-c", READER, BLOBS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "begins\n"
        deployed.stack.up()
        machine.run("touch", "/run/enough")
        looks, seen = json.loads(reader.stdout.read())
    assert looks > 100
    size = (deployed.adapters / "large" / "adapter_model.safetensors").stat().st_size
    (state,) = seen[file(deployed, "large").split("/")[-2]]
    assert state[1] == [size, 2]
    assert {blob: states for blob, states in seen.items() if len(states) != 1} == {}
    assert serves_all(deployed, machine)


def test_killed_in_mid_transfer_the_old_file_is_there_and_no_byte_is_sent_twice(
    deployed: Client, machine: Machine
) -> None:
    old, blobs = served_weights(machine, "large"), machine.run("ls", BLOBS)
    filled_adapter(deployed.adapters / "large", 3, LARGE)

    held = goes_down(deployed, machine, "receive-all", f"{STAGING}/*.part/*.safetensors", size=LARGE // 2 * MIB)

    assert served_weights(machine, "large") == old
    assert machine.run("sha256sum", file(deployed, "large")).split()[0] == old
    assert machine.run("ls", BLOBS) == blobs
    assert LARGE // 2 * MIB <= held < LARGE * MIB
    received = machine.received()

    deployed.stack.up()

    sent = machine.received() - received
    assert sent < LARGE * MIB - held + 2 * MIB, "what had arrived is not sent again"
    assert sent > LARGE * MIB - held, "else this counts nothing"
    assert machine.run("ls", STAGING) == ""
    assert serves_all(deployed, machine)


def test_ctrl_c_ends_an_upload_at_once_and_keeps_what_arrived(deployed: Client, machine: Machine) -> None:
    filled_adapter(deployed.adapters / "large", 4, LARGE)
    with deployed.stack.started("up", "--yes", "--skip-preview") as pulumi:
        pattern = f"{STAGING}/*.part/*.safetensors"
        held = int(machine.run("python3", "-c", HOLDER, "receive-all", pattern, str(LARGE // 2 * MIB), ""))
        try:
            pulumi.send_signal(signal.SIGINT)
            assert pulumi.wait(timeout=60) != 0, "podctl takes nothing more: this would wait for ever"
        finally:
            machine.run("pkill", "-CONT", "-f", "receive-all")
    wait_for(lambda: machine.run("pgrep", "-f", "receive-all", check=False) == "")
    received = machine.received()

    assert deployed.stack.up().changes[f"BundleUpload {BASE}-upload"] == "update"

    assert machine.received() - received < LARGE * MIB - held + 2 * MIB
    assert serves_all(deployed, machine)


def test_a_run_that_dies_after_the_copy_and_before_the_restart_is_made_good(deployed: Client, machine: Machine) -> None:
    unit, old = deployed.unit, served_weights(machine, "acme-v1")
    held = digest(deployed, "acme-v1")
    seeded_adapter(deployed.adapters / "acme-v1", seed=11)
    lock = f"{ROOT}/.lock-{unit.removeprefix('lora-pods-').removesuffix('.service')}"
    machine.run("systemd-run", "--quiet", "--unit=holds-the-activation", "flock", lock, "sleep", "infinity")
    wait_for(lambda: machine.run("sh", "-c", f"flock -n {lock} true || echo held", check=False) == "held\n")
    with deployed.stack.started("up", "--yes", "--skip-preview") as pulumi:
        wait_for(lambda: held not in machine.read(f"{ROOT}/refs/acme/acme-v1"))
        machine.kill()
        machine.boot()
        assert pulumi.wait(timeout=180) != 0
    wait_for(lambda: is_up(machine))
    assert served_weights(machine, "acme-v1") == old, "it was copied, and is not loaded"

    assert deployed.stack.up().changes[f"Command {BASE}-activate"] == "update"

    assert serves_all(deployed, machine)


def test_a_pod_that_goes_down_while_an_engine_is_tried_comes_back_and_the_next_run_ends_it(
    deployed: Client, machine: Machine
) -> None:
    deployed.pods[0]["engine"]["maxModelLen"] = 99
    deployed.configure()

    goes_down(deployed, machine, "activate", f"/etc/systemd/system/{deployed.unit}", text="--max-model-len")

    assert serves_all(deployed, machine), "by itself, though nobody proved it"
    assert refreshed(deployed)[0] == ['activation: "the last one did not end well"']
    assert deployed.stack.up().changes[f"Command {BASE}-activate"] == "update"
    assert serves_all(deployed, machine)
    assert "--max-model-len" in machine.argv(machine.pid(deployed.unit))


def test_a_byte_that_rots_on_the_target_is_noticed_and_mended(deployed: Client, machine: Machine) -> None:
    path, whole = file(deployed, "acme-v1"), weights(deployed, "acme-v1")
    before = machine.run("stat", "--format=%s %Y", path)
    rots = f"touch -r {path} /run/then && printf X | dd of={path} bs=1 seek=900 conv=notrunc status=none"
    machine.run("sh", "-c", f"{rots} && touch -r /run/then {path}")
    assert machine.run("stat", "--format=%s %Y", path) == before
    assert machine.run("sha256sum", path).split()[0] != whole

    run = deployed.stack.up("--refresh")

    assert f"blob of acme-v1: sha256:{path.split('/')[-2]} was altered\n" in run.output
    assert machine.run("sha256sum", path).split()[0] == whole
    assert serves_all(deployed, machine)


def test_local_bytes_that_differ_at_the_same_size_and_time_are_sent(deployed: Client, machine: Machine) -> None:
    path = deployed.adapters / "acme-v2" / "adapter_model.safetensors"
    before = path.stat()
    seeded_adapter(path.parent, seed=22)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert deployed.stack.up().changes == {"AdapterBundle acme-v2": "replace", **PLACING, **ENGINE}
    assert serves_all(deployed, machine)


def test_a_touched_file_with_the_same_bytes_restarts_and_sends_nothing(deployed: Client, machine: Machine) -> None:
    pid, received = machine.pid(deployed.unit), machine.received()
    for path in deployed.adapters.rglob("*"):
        os.utime(path)
    assert deployed.stack.up("--expect-no-changes").changes == {}
    assert machine.pid(deployed.unit) == pid
    assert machine.received() - received < 10_000


def test_a_stray_file_in_an_adapters_directory_on_the_target_is_noticed(deployed: Client, machine: Machine) -> None:
    blob = str(Path(file(deployed, "acme-v2")).parent)
    machine.run("tee", f"{blob}/tokenizer.json", stdin="{}")

    found, output = refreshed(deployed)

    told = f"sha256:{blob.split('/')[-1]} was altered: not of it is tokenizer.json"
    assert found == [f'blob of acme-v2: "{told}"']
    assert f"blob of acme-v2: {told}\n" in output
    deployed.stack.up()
    assert machine.run("ls", blob).split() == ["adapter_config.json", "adapter_model.safetensors"]
    assert serves_all(deployed, machine)


def test_a_preview_names_the_changed_adapter_and_says_restart(deployed: Client) -> None:
    path = deployed.adapters / "acme-v1" / "adapter_model.safetensors"
    whole, old = path.read_bytes(), digest(deployed, "acme-v1")
    seeded_adapter(path.parent, seed=111)

    told = said(deployed.stack.preview())

    assert told[0] == f"{BASE}: 3 adapters, 1 changed"
    assert told[1].startswith(f"  ~ acme-v1 {old} → ")
    assert told[1].split()[-1] not in (old, "→")
    assert told[-1] == "  the engine restarts: adapters changed"
    path.write_bytes(whole)


def test_an_adapter_removed_from_the_list_is_gone_once_nothing_refers_to_it(deployed: Client, machine: Machine) -> None:
    """A kept generation of the unit refers to it as well, since `lora rollback` may bring it back."""
    del deployed.models[-1]

    assert deployed.up().changes == {"AdapterBundle large": "delete", **PLACING, **ENGINE}

    assert {model["id"] for model in machine.get("/v1/models")["data"]} == {BASE, "acme-v1", "acme-v2"}
    assert machine.run("ls", f"{ROOT}/refs/acme").split() == ["acme-v1", "acme-v2"]
    kept = machine.run("sh", "-c", f"grep -rhoE 'sha256/[0-9a-f]{{64}}' {ROOT}/units | sort -u | cut -d/ -f2")
    assert machine.run("ls", BLOBS) == kept
    for path in machine.run("sh", "-c", f"ls -d {ROOT}/units/*/*").split():
        if "large" in machine.read(f"{path}/unit"):
            machine.run("rm", "-r", path)
    result = json.loads(machine.run("python3", f"{ROOT}/bin/podctl", "gc"))
    assert len(result["collected"]) >= 1
    assert call("exec", machine.name, "sh", "-c", f"ls {BLOBS} | wc -l").strip() == "2"
    assert serves_all(deployed, machine)
