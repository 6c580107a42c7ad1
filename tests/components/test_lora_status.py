"""`lora status -s STACK`: whom it asks, what it shows and what it exits with. With real SSH servers in this process."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml

from components.cli import pods
from components.cli.main import main
from components.core.naming import engine_key
from components.core.ssh_key import shown_key
from components.on_pod.boot import podctl_source

CLIENT, SERVER, STRANGER = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(3))


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


class Servers:
    """SSH servers on this machine; each answers every command with its text, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._open: list[asyncssh.SSHAcceptor] = []

    def start(self, answer: str, status: int = 0, host_key: asyncssh.SSHKey = SERVER) -> int:
        async def reply(process: asyncssh.SSHServerProcess[bytes]) -> None:
            self.told.append((process.command or "", (await process.stdin.read()).decode()))
            (process.stderr if status else process.stdout).write(answer.encode() + b"\n")
            process.exit(status)

        async def listen() -> asyncssh.SSHAcceptor:
            allowed = asyncssh.import_authorized_keys(public(CLIENT))
            return await asyncssh.listen(
                "127.0.0.1",
                0,
                server_host_keys=[host_key],
                authorized_client_keys=allowed,
                process_factory=reply,
                encoding=None,
            )

        self._open.append(asyncio.run_coroutine_threadsafe(listen(), self._loop).result())
        return int(self._open[-1].get_port())

    def close(self) -> None:
        for server in self._open:
            self._loop.call_soon_threadsafe(server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the stack file of `acme`: a host for each of these ports, and more configuration."""
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "key").write_text(CLIENT.export_private_key().decode())
    monkeypatch.chdir(tmp_path)

    def write(*ports: int, **more: Any) -> None:
        hosts = [
            {
                "base": f"org/base-{n}",
                "host": {"address": "127.0.0.1", "port": port, "user": "ops", "hostKey": public(SERVER)},
                "engine": {"python": "/opt/vllm/bin/python", "port": 8000 + n},
            }
            for n, port in enumerate(ports)
        ]
        config = {"pods": hosts, **more}
        text = yaml.safe_dump({"config": {f"lora-pods:{key}": value for key, value in config.items()}})
        (tmp_path / "stacks" / "Pulumi.acme.yaml").write_text(text)

    return write


def status(*words: str) -> int:
    return main(["status", "-s", "acme", "--identity", "key", *words])


def answer(base: str, **engine: Any) -> str:
    GiB = 1024**3
    found = {
        "engine": engine_key("acme", base), "stack": "acme", "state": "active (running)", "since": time.time() - 7300,
        "enabled": True, "models": [base, "acme-v1"], "vllm": "0.33.0", "drift": {}, **engine,
    }  # fmt: skip
    return json.dumps(
        {
            "machineId": "0123",
            "disk": {"freeBytes": 12 * GiB, "totalBytes": 64 * GiB},
            "gpus": [{"name": "NVIDIA L40S", "usedMiB": 40960, "totalMiB": 46068}],
            "engines": [{**found, "engine": "another-stacks"}, found],
        }
    )


def test_a_pod_that_is_well(servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    port = servers.start(answer("org/base-0"))
    stack(port)

    assert status() == 0

    at = f"ops@127.0.0.1:{port}"
    assert capsys.readouterr() == (
        f"pod         at{' ' * (len(at) - 2)}  unit              since  vLLM    GPU                        disk\n"
        f"org/base-0  {at}  active (running)  2 h    0.33.0  NVIDIA L40S 40.0/45.0 GiB  12.0 GiB of 64.0 GiB free\n"
        "  serves org/base-0, acme-v1\n",
        "",
    )
    assert servers.told == [("sudo -n python3 - status", podctl_source())], "also where no podctl is, or another one"


def test_a_dead_pod_is_one_line_and_the_others_are_asked_at_the_same_time(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    drift = {"unit": "was edited by hand", "serves": "/v1/models lists \x1b[31mx, which is not declared"}
    drifted = servers.start(answer("org/base-0", drift=drift, models=None, since=None, state="inactive (dead)"))
    other = servers.start(answer("org/base-9"))
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        hanging, refused = silent.getsockname()[1], closed.getsockname()[1]
        closed.close()
        stack(drifted, other, hanging, hanging, refused, servers.start("no disk:\x1b[2J gone", status=1))
        began = time.monotonic()

        assert status("--timeout", "1.5") == 1

        assert time.monotonic() - began < 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith("  ")] == [
        "pod", *(f"org/base-{n}" for n in range(6)),
    ]  # fmt: skip
    assert lines[1].split()[2:] == [
        *("inactive", "(dead)", "-", "0.33.0", "NVIDIA", "L40S", "40.0/45.0", "GiB"),
        *("12.0", "GiB", "of", "64.0", "GiB", "free"),
    ]
    assert lines[2:4] == [
        "  DRIFT serves: /v1/models lists \\x1b[31mx, which is not declared",
        "  DRIFT unit: was edited by hand",
    ]
    assert lines[5] == "  DRIFT engine: is not on this pod"
    assert lines[6:] == [
        f"org/base-2  NOT REACHED: ops@127.0.0.1:{hanging} does not answer within 1.5 s",
        f"org/base-3  NOT REACHED: ops@127.0.0.1:{hanging} does not answer within 1.5 s",
        f"org/base-4  NOT REACHED: ops@127.0.0.1:{refused} cannot be reached (Connection refused): is the "
        "machine up, and its SSH port open to this one?",
        "org/base-5  NOT REACHED: no disk:\\x1b[2J gone",
    ]


def test_a_pod_with_another_host_key(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    port = servers.start(answer("org/base-0"), host_key=STRANGER)
    stack(port)
    told = (
        f"ops@127.0.0.1:{port} shows another host key, {shown_key(public(STRANGER))}, than the pinned one, "
        f"{shown_key(public(SERVER))}: it is another machine, or someone is in between, and nothing was sent; if "
        "a host was replaced on purpose, set its new hostKey (an ec2 instance or a sandbox: `pulumi up --replace` its "
        "URN)\n"
    )
    assert status() == 1
    assert capsys.readouterr().out == f"org/base-0  NOT REACHED: {told}"
    assert main(["rollback", "-s", "acme", "--identity", "key", "--base", "org/base-0"]) == 1
    assert capsys.readouterr() == ("", told)
    assert servers.told == []


def test_json(servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    port = servers.start(answer("org/base-0", since=1, drift={"unit": "is gone"}))
    stack(port, 1)

    assert status("--json") == 1

    told = json.loads(capsys.readouterr().out)
    one, other = told.pop("pods")
    assert told == {"stack": "acme"}
    assert one == {
        "base": "org/base-0", "at": f"ops@127.0.0.1:{port}", "switchedOff": False, "reachable": True, "fault": None,
        "machineId": "0123", "drift": {"unit": "is gone"}, "engine": json.loads(answer("", since=1))["engines"][1] | {
            "engine": engine_key("acme", "org/base-0"), "models": ["org/base-0", "acme-v1"],
            "drift": {"unit": "is gone"},
        },
        "gpus": [{"name": "NVIDIA L40S", "usedMiB": 40960, "totalMiB": 46068}],
        "disk": {"freeBytes": 12 * 1024**3, "totalBytes": 64 * 1024**3},
    }  # fmt: skip
    assert (other["reachable"], other["drift"], other["engine"]) == (False, {}, None)
    assert other["fault"].startswith("ops@127.0.0.1:1 cannot be reached")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-s", "absent"], "stacks/Pulumi.absent.yaml: no such file; the stacks here are: acme"),
        (["-s", "acme", "--identity", "nowhere"], "--identity nowhere: cannot be read (no such file or directory)"),
        (["-s", "acme", "--identity", "~no-such-user/k"], "--identity ~no-such-user/k: cannot be read (no such file "),
        (["-s", "acme", "--identity", "Pulumi.yaml"], "--identity Pulumi.yaml: no private key: it must begin with "),
    ],
)
def test_what_is_given_wrong(
    stack: Callable[..., None], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    stack(1)
    assert main(["status", *words]) == 2
    assert capsys.readouterr().err.startswith(f"lora: {told}")


def test_the_key_comes_from_the_stack_file_through_pulumi(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack(servers.start(answer("org/base-0")))
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        key = Path("key").read_text()
        return subprocess.CompletedProcess(command, code, key if not code else "", "error: incorrect passphrase\n")

    monkeypatch.setattr(subprocess, "run", run)
    code = 0
    assert main(["status", "-s", "acme"]) == 0
    get = ["pulumi", "config", "get", "lora-pods:sshPrivateKey", "--stack", "acme", "--non-interactive"]
    assert asked == [get]
    code = 255
    assert main(["status", "-s", "acme"]) == 2
    assert capsys.readouterr().err == (
        "lora: the SSH key that opens the pods cannot be had: `pulumi config get` failed (incorrect passphrase); "
        "or give it with --identity FILE\n"
    )


@pytest.mark.parametrize("running", [False, "false"], ids=["by hand", "by pulumi config set"])
def test_what_is_switched_off_is_not_asked(
    running: object, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack(pods=[{"base": "/models/tiny", "sandbox": {}}], running=running)
    monkeypatch.setattr(pods, "ask_pulumi", lambda *_, **__: pytest.fail("pulumi is asked"))
    assert main(["status", "-s", "acme"]) == 0
    assert capsys.readouterr().out == "/models/tiny  is switched off (lora-pods:running is false)\n"


def test_where_an_instance_is_only_the_state_knows(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ec2 = {"instanceType": "g6e.xlarge", "region": "eu-central-1", "sshCidr": "203.0.113.7/32", "volumeGiB": 200}
    engine = {"vllm": {"version": "0.33.0"}}
    stack(pods=[{"base": base, "ec2": ec2, "engine": engine} for base in ("org/a", "org/never")])
    port = servers.start(answer("org/a"))
    connection = {"address": "127.0.0.1", "port": float(port), "user": "ubuntu", "hostKey": public(SERVER)}
    reach = {
        "urn": "urn:pulumi:acme::lora-pods::lora-pods:index:GpuPod$x::org/a-reach",
        "type": "pulumi-python:dynamic/lora-pods:ReachedPod",
        "outputs": {"connection": connection},
    }

    def ask(*words: str, to_ask_for: str) -> str:
        assert words == ("stack", "export", "--stack", "acme")
        return json.dumps({"deployment": {"resources": [reach]}})

    monkeypatch.setattr(pods, "ask_pulumi", ask)
    assert status() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"org/a  ubuntu@127.0.0.1:{port}  active (running)")
    assert lines[-1] == "org/never  NOT REACHED: is not in the stack's state: `pulumi up` makes it"
