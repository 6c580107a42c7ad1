"""Secrets, each a canary: where they must not be, on this machine and on the pod."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.conftest import Client, Key, host_pod
from tests.engine.test_public_listener import certificate
from tests.support.adapters import seeded_adapter
from tests.support.machines import ROOT, Machine, call
from tests.support.stacks import LOUD

pytestmark = pytest.mark.pod

API_KEY = "CANARY-api-key-$%\"'\\ 1"
NEXT_KEY = "CANARY-next-3"
HF_TOKEN = "hf_CANARYtoken2"


def everything_said(client: Client, machine: Machine) -> dict[str, str]:
    """All that a user, a log or another user of the pod could read."""
    processes = machine.run("bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    unit = client.unit
    return {
        "state": json.dumps(client.stack.export()),
        "outputs": client.stack.pulumi("stack", "output", "--json", "--show-secrets", "--stack", client.stack.name),
        "stack file": client.stack.file.read_text(),
        "unit": machine.read(f"/etc/systemd/system/{unit}"),
        "systemctl show": machine.run("systemctl", "show", unit),
        "systemctl cat": machine.run("systemctl", "cat", unit),
        "journal": machine.run("journalctl", "--no-pager"),
        "argv": processes,
        "readable files": machine.run(
            "bash",
            "-c",
            "find / -xdev -type f -perm /044 -newer /etc/machine-id -size -1M -not -path '/proc/*' "
            "-not -path '/sys/*' -print0 | xargs -0 cat 2>/dev/null | tr -d '\\0' || true",
        ),
    }


@contextmanager
def executed(machine: Machine, trace: Path) -> Iterator[None]:
    """Write every program, with its whole argv, that is started over SSH on the machine to `trace`."""
    init = call("inspect", "--format", "{{.State.Pid}}", machine.name).strip()
    sshd = subprocess.run(
        ["pgrep", "-P", init, "-x", "sshd"], capture_output=True, text=True, check=True
    ).stdout.strip()
    words = ["strace", "-f", "-qq", "-s", "1000000", "-e", "trace=execve", "-o", str(trace), "-p", sshd]
    tracer = subprocess.Popen(words)
    try:
        yield
    finally:
        tracer.terminate()
        tracer.wait()


def test_canaries(client: Client, machine: Machine, key: Key, tmp_path: Path) -> None:
    shown, tls_key = certificate(client.stack.file.parent, "pod")
    client.pods = [host_pod(machine, listen="0.0.0.0", tls={"certificate": shown.name})]
    client.configure(apiKey=API_KEY, hfToken=HF_TOKEN, tlsKey=tls_key.read_text())
    with executed(machine, tmp_path / "argv-on-the-pod"):
        up = ("up", "--yes", "--skip-preview", "--stack", client.stack.name)
        argv_here, first = client.stack.traced("execve", *up, *LOUD)
    argv_there = (tmp_path / "argv-on-the-pod").read_text(errors="replace")
    assert "pulumi-resource-command" in argv_here
    assert all(f'"{verb}"' in argv_there for verb in ("receive-all", "place", "secrets", "activate"))
    assert '"msg":"Planner decided to create' in first, "pulumi's own log is searched too"
    said = {"first run": first, "second run": client.stack.up(*LOUD).output}

    seeded_adapter(client.adapters / "acme-v2", config={"standin_fail": f"cannot use {HF_TOKEN} and {API_KEY} here"})
    told = client.stack.up(*LOUD, fails=True).output
    assert "ValueError: cannot use [secret] and [secret] here" in told, "the engine itself told it to its journal"
    said |= {"failed activation": told, "events of it": client.stack.events()}

    # Another secret and another adapter, and neither can be put where it belongs.
    seeded_adapter(client.adapters / "acme-v2", seed=9)
    client.configure(apiKey=NEXT_KEY)
    machine.run("sh", "-c", f"cd {ROOT} && mv secrets aside && rm -r staging && touch secrets staging")
    told = client.stack.up(*LOUD, fails=True).output
    assert told.count("updating failed") >= 2, "the secrets' command and the upload"
    said |= {"failed command and upload": told, "events of both": client.stack.events()}
    machine.run("sh", "-c", f"cd {ROOT} && rm secrets staging && mv aside secrets")

    said |= everything_said(client, machine) | {"argv here": argv_here, "argv on the pod": argv_there}
    # That journal is root's; what this project prints of it is searched above and below.
    for where in ("journal", "readable files"):
        said[where] = said[where].replace(f"cannot use {HF_TOKEN} and {API_KEY} here", "")
    secrets = {
        "API key": API_KEY, "API key's plain part": "CANARY-api-key", "next API key": NEXT_KEY, "token": HF_TOKEN,
        "SSH key": key.private.splitlines()[2], "TLS key": tls_key.read_text().splitlines()[2],
    }  # fmt: skip
    for where, text in said.items():
        for name, secret in secrets.items():
            assert secret not in text, f"the {name} stands in {where}"
            assert json.dumps(secret)[1:-1] not in text, f"the {name} stands in {where}, as JSON"

    # The engine has them all the same, to the letter.
    pid = machine.pid(client.unit)
    environment = machine.read(f"/proc/{pid}/environ").split("\0")
    assert f"VLLM_API_KEY={API_KEY}" in environment
    assert f"HF_TOKEN={HF_TOKEN}" in environment
    assert machine.get("/v1/models", {"Authorization": f"Bearer {API_KEY}"}, port=18000)["data"]


def test_a_secret_in_the_open_is_refused(client: Client) -> None:
    client.stack.pulumi("config", "set", "--plaintext", "apiKey", API_KEY, "--stack", client.stack.name)
    run = client.stack.preview(fails=True)
    assert "apiKey: stands in the stack file for everyone to read" in run.output
    assert "CANARY" not in run.output


def test_a_secret_inside_a_list_is_refused(client: Client) -> None:
    path = "pods[0].engine.env.TOKEN"
    client.stack.pulumi("config", "set", "--path", "--secret", path, HF_TOKEN, "--stack", client.stack.name)
    run = client.stack.preview(fails=True)
    assert "pods: holds a `secure:` value" in run.output
    assert "CANARY" not in run.output


def test_the_secrets_file_is_roots_alone(client: Client, machine: Machine, tmp_path: Path) -> None:
    client.configure(apiKey=API_KEY)
    client.stack.up()
    listing = machine.run("bash", "-c", f"stat --format='%a %U %n' {ROOT}/secrets {ROOT}/secrets/*")
    directory, *files = [line.split()[:2] for line in listing.splitlines()]
    assert directory == ["700", "root"]
    assert files
    assert all(file == ["600", "root"] for file in files)
