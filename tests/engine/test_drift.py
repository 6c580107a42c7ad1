"""What a refresh sees of a pod that is not as it was left: each as a line of its own; the next `up` mends it.

What is found, one by one, is tested with podctl (test_podctl_drift); here, that all of it comes through Pulumi.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.engine.conftest import BASE, Client, host_pod
from tests.engine.test_change import served_weights, weights
from tests.support.machines import ROOT, Machine, generate_key, wait_for

pytestmark = pytest.mark.pod

VENV = f"{ROOT}/venvs/vllm-0.33.0"
# What a request to unload an adapter does, where VLLM_ALLOW_RUNTIME_LORA_UPDATING lets it.
UNLOADS = "s/^    server.serve_forever/    signal.signal(signal.SIGUSR1, lambda *_: server.adapters.clear())\\n&/"


def refreshed(client: Client) -> tuple[list[str], str]:
    """(the lines of the difference that a refresh shows, all it prints)."""
    output = client.stack.refresh("--diff").output
    lines = [line.strip() for line in output.splitlines()]
    return sorted(
        " ".join(line[1:].split()) for line in lines if line.startswith("+ ") and not line.endswith("{")
    ), output


def lora(client: Client, *words: str) -> tuple[int, str]:
    """(exit code, what it prints) of `lora` in the client's checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "components.cli.main", *words],
        cwd=client.stack.checkout.root,
        env=client.stack.checkout.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def is_mended(client: Client, machine: Machine) -> None:
    client.stack.up()
    assert refreshed(client)[0] == []
    for model in ("acme-v1", "acme-v2"):
        assert served_weights(machine, model) == weights(client, model)
    assert machine.show(client.unit, "UnitFileState", "ActiveState") == {
        "UnitFileState": "enabled",
        "ActiveState": "active",
    }


def test_what_differs_on_a_pod_is_told_line_by_line_and_mended(client: Client, machine: Machine) -> None:
    client.pods[0] = host_pod(machine, vllm={"version": "0.33.0"})
    del client.pods[0]["engine"]["python"]
    client.up()
    unit, fragment = client.unit, f"/etc/systemd/system/{client.unit}"
    v1, v2 = (client.stack.outputs()["engines"][BASE]["models"][model] for model in ("acme-v1", "acme-v2"))
    blobs = f"{ROOT}/blobs/sha256"
    (server,) = machine.run(
        "sh", "-c", f"ls {VENV}/lib/python*/site-packages/vllm/entrypoints/openai/api_server.py"
    ).split()
    machine.run("sed", "-i", UNLOADS, server)
    machine.run("systemctl", "restart", unit)
    wait_for(lambda: machine.run("curl", "-sf", "http://127.0.0.1:8000/v1/models", check=False) != "")
    assert refreshed(client)[0] == []
    code, said = lora(client, "status", "-s", "acme", "--json")
    (pod,) = json.loads(said)["pods"]
    assert (code, pod["drift"], pod["engine"]["models"]) == (0, {}, [BASE, "acme-v1", "acme-v2"])
    assert (pod["engine"]["state"], pod["engine"]["vllm"]) == ("active (running)", "0.33.0")
    assert 0 <= time.time() - pod["engine"]["since"] < 300

    # A blob is gone, in another one a byte rots; an adapter is unloaded, the unit edited, and not started at boot.
    rotten = f"{blobs}/{v2.removeprefix('sha256:')}/adapter_model.safetensors"
    machine.run("rm", "-rf", f"{blobs}/{v1.removeprefix('sha256:')}")
    machine.run("sh", "-c", f"printf X | dd of={rotten} bs=1 seek=900 conv=notrunc status=none && touch -d @1 {rotten}")
    machine.run("systemctl", "disable", unit)
    machine.run("sed", "-i", "s/^Restart=.*/Restart=no/", fragment)
    machine.run("systemctl", "kill", "--signal=SIGUSR1", "--kill-who=main", unit)
    wait_for(lambda: len(machine.get("/v1/models")["data"]) == 1)
    told = [
        'at boot : "it would not start: its unit is not enabled"',
        f'blob of acme-v1: "{v1} is gone"',
        f'blob of acme-v2: "{v2} was altered"',
        'serves : "/v1/models does not list acme-v1"',
        'unit : "was edited by hand"',
    ]
    found, output = refreshed(client)
    assert found == told
    code, said = lora(client, "status", "-s", "acme")
    assert code == 1
    assert "\n  serves /models/tiny\n" in said
    assert "\n  DRIFT unit: was edited by hand\n" in said
    assert f"\n  DRIFT blob of acme-v1: {v1} is gone\n" in said
    engine = unit.removeprefix("lora-pods-").removesuffix(".service")
    assert f"drift of {engine}: unit: was edited by hand\n" in output, "also to who does not ask for --diff"
    preview = client.stack.preview("--diff").output
    for line in told:
        assert line in [" ".join(shown.strip()[1:].split()) for shown in preview.splitlines()], line
    is_mended(client, machine)

    # The engine is stopped, and another vLLM lies where the pinned one was.
    machine.run("uv", "pip", "install", "-q", "--python", f"{VENV}/bin/python", "vllm==0.33.1")
    machine.run("systemctl", "stop", unit)
    assert refreshed(client)[0] == [
        'engine: "does not run: inactive (dead)"',
        'vLLM : "0.33.1 is installed, and 0.33.0 was proven"',
    ]
    is_mended(client, machine)
    assert machine.get("/version") == {"version": "0.33.0"}

    # Another machine behind the same address: first with the host key of the one before, then with its own.
    machine.run("sh", "-c", "systemd-id128 new > /etc/machine-id")
    (line,) = refreshed(client)[0]
    assert line.startswith(f'machine: "is another one, {machine.read("/etc/machine-id").strip()} in /etc/machine-id ')
    is_mended(client, machine)
    for path in machine.keys.glob("ssh_host_ed25519_key*"):
        path.unlink()
    client.pods[0]["host"]["hostKey"] = generate_key(machine.keys / "ssh_host_ed25519_key")
    machine.run("/usr/local/sbin/lora-pods-keys")
    machine.run("systemctl", "restart", "ssh")
    (line,) = refreshed(client)[0]
    assert line.startswith(f'host key: "root@127.0.0.1:{machine.port()} shows another host key, SHA256:')
    assert "shows another host key" in client.stack.up(fails=True).output
    client.configure()
    is_mended(client, machine)

    # A pod that does not answer is no difference: it is said that it was not looked at.
    machine.kill()
    began = time.monotonic()
    found, output = refreshed(client)
    assert found == []
    assert f"warning: the pod of {engine} was not looked at: root@127.0.0.1:" in output
    assert time.monotonic() - began < 90
    code, said = lora(client, "status", "-s", "acme")
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(f"{BASE}  NOT REACHED: root@127.0.0.1:")
    assert client.stack.preview("--expect-no-changes").changes == {}
