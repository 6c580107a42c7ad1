"""The sandbox's container, made and kept by a container engine that only remembers what it was told."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from components.core.errors import UserError
from components.pods import sandbox
from components.pods.sandbox import SandboxContainerProvider, machine_options, remove_left_over
from tests.support.closed import close

NAME = "lora-pods-acme"


class Engine:
    """Stands for podman: containers are what `run` was told, and every start gives other ports, as docker's do."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.made = self.starts = 0
        self.down = self.port_taken = False

    def __call__(self, command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == "/usr/bin/podman"
        words = [word for word in command[1:] if word not in ("--runtime", "runc")]
        if self.down:
            return subprocess.CompletedProcess(words, 125, "", "Cannot connect to the daemon\n")
        verb, last = words[0], words[-1]
        if verb in ("run", "create"):
            return self._run(words)
        if verb == "image":
            return subprocess.CompletedProcess(words, 0, "", "")
        found = self.containers.get(last) or next((c for c in self.containers.values() if c["Id"] == last), None)
        if found is None:
            return subprocess.CompletedProcess(words, 125, "", f"Error: inspecting object: no such container {last}\n")
        if verb == "start":
            if self.port_taken:
                return subprocess.CompletedProcess(words, 125, "", "Error: cannot listen: address already in use\n")
            self.start(found)
        elif verb == "stop":
            self.stop(found["Name"])
        elif verb == "rm":
            del self.containers[found["Name"]]
        return subprocess.CompletedProcess(words, 0, json.dumps([found]), "")

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        options = [word.split("=", 1) for word in words if word.startswith("--") and "=" in word]
        name = next(value for option, value in options if option == "--name")
        assert name not in self.containers
        self.made += 1
        given = [value.split(":") for option, value in options if option == "--publish"]
        bindings = {f"{inside}/tcp": [{"HostIp": host, "HostPort": port}] for host, port, inside in given}
        labels = dict(value.split("=", 1) for option, value in options if option == "--label")
        ports = [value.split(":")[-1] for option, value in options if option == "--publish"]
        self.containers[name] = {
            "Id": f"id-{self.made}",
            "Name": name,
            "Config": {"Labels": labels},
            "State": {"Running": False, "StartedAt": "never"},
            "NetworkSettings": {"Ports": {}},
            "HostConfig": {"PortBindings": bindings},
            "ports": ports,
        }
        if words[0] == "run":
            self.start(self.containers[name])
        return subprocess.CompletedProcess(words, 0, "", "")

    def start(self, container: dict[str, Any]) -> None:
        self.starts += 1
        container["State"] = {"Running": True, "StartedAt": f"start {self.starts}"}
        container["NetworkSettings"] = {
            "Ports": {f"{port}/tcp": [{"HostPort": f"{self.starts}{port}"}] for port in container["ports"]}
        }

    def stop(self, name: str) -> None:
        self.containers[name]["State"]["Running"] = False
        self.containers[name]["NetworkSettings"] = {"Ports": {}}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("LORA_PODS_CONTAINER_ENGINE", raising=False)
    return made


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Goes to the project of a checkout, made where it is missing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def enter(name: str) -> Path:
        root = tmp_path / name
        (root / "stacks").mkdir(parents=True, exist_ok=True)
        (root / "models").mkdir(exist_ok=True)
        (root / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
        monkeypatch.chdir(root)
        return root

    return enter


PROPS = {
    "name": NAME,
    "image": "localhost/some-image",
    "volumes": {"/models": "../models"},
    "shmMiB": 256,
    "enginePort": 8000,
    "hostKey": "ssh-ed25519 AAAA",
    "started": None,
    "ssh_port": None,
    "endpoint_port": None,
}
PROVIDER = SandboxContainerProvider()


def test_a_container_that_runs_as_described_is_left_alone(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    assert {**made.outs, **PROPS} == {**PROPS}
    assert (made.outs["started"], made.outs["ssh_port"], made.outs["endpoint_port"]) == ("start 1", 122, 18000)
    difference = PROVIDER.diff(made.id, made.outs, PROPS)
    assert (difference.changes, difference.replaces) == (False, [])


def test_a_container_of_another_checkout_is_refused_and_left_alone(
    engine: Engine, enter: Callable[[str], Path]
) -> None:
    one = enter("one")
    first = PROVIDER.create(PROPS)
    enter("two")
    with pytest.raises(UserError) as refused:
        PROVIDER.create(PROPS)
    assert str(refused.value) == (
        f"the container {NAME} belongs to another checkout, {one}/stacks: "
        "run `./dev down` or `pulumi destroy` there, or use another stack name"
    )
    # Nor does a stack that had a container of that name take it over, or take it away.
    assert first.outs is not None
    with pytest.raises(UserError, match="belongs to another checkout"):
        PROVIDER.update("id-of-mine", first.outs, PROPS)
    PROVIDER.delete("id-of-mine", PROPS)
    with pytest.raises(UserError, match="belongs to another checkout"):
        remove_left_over("acme", Path.cwd())
    assert engine.containers[NAME]["Id"] == first.id
    # The way out is told to who can go there no more.
    shutil.rmtree(one)
    with pytest.raises(UserError, match=r"one/stacks, which is gone: remove it \(`podman rm --force --volumes lora-po"):
        PROVIDER.create(PROPS)


def test_a_checkout_that_cannot_be_looked_at_is_not_taken_for_gone(
    engine: Engine, enter: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = enter("one")
    PROVIDER.create(PROPS)
    enter("two")
    close(one, monkeypatch)
    with pytest.raises(UserError, match=r"one/stacks: run `\./dev down` or `pulumi destroy` there, or use another"):
        PROVIDER.create(PROPS)


@pytest.mark.parametrize("source", ["../closed/models", "x" * 300, "../loop", "~no-such-user/models"])
def test_a_volume_that_cannot_be_looked_at(
    engine: Engine, enter: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    one = enter("one")
    (one / "closed" / "models").mkdir(parents=True)
    (one / "loop").symlink_to("loop")
    close(one / "closed", monkeypatch)
    with pytest.raises(UserError, match="is no directory on this machine, or not for this user"):
        PROVIDER.create({**PROPS, "volumes": {"/models": source}})
    assert engine.containers == {}


def test_a_container_that_no_checkout_made_is_refused(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    engine(["/usr/bin/podman", "run", f"--name={NAME}", "busybox"])
    with pytest.raises(UserError, match="was not made by any checkout of this project: remove it"):
        PROVIDER.create(PROPS)


def test_a_container_that_an_interrupted_run_left_is_taken_up(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    left = PROVIDER.create(PROPS)
    assert PROVIDER.create(PROPS).id == left.id
    assert PROVIDER.create({**PROPS, "shmMiB": 512}).id != left.id
    assert list(engine.containers) == [NAME]


def test_the_label_knows_where_the_volumes_lie_and_the_state_does_not(
    engine: Engine, enter: Callable[[str], Path], tmp_path: Path
) -> None:
    one = enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    assert str(tmp_path) not in json.dumps(made.outs)
    # The checkout moved: what the container mounts is there no more.
    one.rename(tmp_path / "two")
    enter("two")
    difference = PROVIDER.diff(made.id, made.outs, PROPS)
    assert difference.replaces == ["container"]
    # It is this stack's still, by its id.
    PROVIDER.delete(made.id, made.outs)
    assert engine.containers == {}


def test_deleting_what_is_gone_already(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    PROVIDER.delete("id-1", PROPS)


@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param(lambda engine: engine.stop(NAME), id="stopped"),
        pytest.param(lambda engine: engine.start(engine.containers[NAME]), id="restarted"),
        pytest.param(
            lambda engine: engine.containers[NAME]["NetworkSettings"]["Ports"].update({"22/tcp": [{"HostPort": "9"}]}),
            id="another port for SSH",
        ),
        pytest.param(
            lambda engine: engine.containers[NAME]["NetworkSettings"]["Ports"].update({"8000/tcp": None}),
            id="no port for the engine",
        ),
    ],
)
def test_what_happened_without_pulumi_is_an_update(
    engine: Engine, enter: Callable[[str], Path], meanwhile: Callable[[Engine], object]
) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    meanwhile(engine)
    difference = PROVIDER.diff(made.id, made.outs, PROPS)
    assert (difference.changes, difference.replaces) == (True, [])


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        pytest.param(lambda engine: engine.containers.clear(), "the container is gone", id="gone"),
        pytest.param(lambda engine: engine.stop(NAME), "the container is stopped", id="stopped"),
    ],
)
def test_a_refresh_says_what_happened_to_a_container(
    engine: Engine,
    enter: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    meanwhile: Callable[[Engine], object],
    told: str,
) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    read = PROVIDER.read(made.id, made.outs)
    assert (read.id, read.outs, capsys.readouterr().err) == (made.id, made.outs, "")
    meanwhile(engine)

    read = PROVIDER.read(made.id, made.outs)

    assert (read.id, read.outs) == (made.id, {**made.outs, "started": told}), "what is on it is undone with it"
    assert capsys.readouterr().err == f"drift of {NAME}: sandbox: {told}\n"
    assert PROVIDER.diff(made.id, read.outs or {}, PROPS).changes is True
    off = {**made.outs, "running": False}
    if engine.containers:
        assert PROVIDER.read(made.id, off).outs == off, "one that is to be off may be stopped"


def test_an_update_tells_the_new_ports(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    engine.stop(NAME)
    updated = PROVIDER.update(made.id, made.outs, PROPS)
    assert updated.outs is not None
    assert (updated.outs["started"], updated.outs["ssh_port"], updated.outs["endpoint_port"]) == ("start 2", 222, 28000)
    assert engine.containers[NAME]["Id"] == made.id


def test_a_container_that_cannot_be_started_again(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    engine.stop(NAME)
    engine.port_taken = True
    with pytest.raises(UserError) as failed:
        PROVIDER.update(made.id, made.outs, PROPS)
    assert str(failed.value) == (
        "podman start failed: Error: cannot listen: address already in use: if it stays so, "
        f"remove it (`podman rm --force --volumes {NAME}`), and `pulumi up` makes another"
    )
    assert engine.containers[NAME]["Id"] == made.id


def test_an_engine_that_does_not_answer_is_not_a_container_that_is_gone(
    engine: Engine, enter: Callable[[str], Path]
) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    engine.down = True
    sentence = f"podman cannot say whether {NAME} is there: Cannot connect to the daemon"
    with pytest.raises(UserError, match=sentence):
        PROVIDER.diff(made.id, made.outs, PROPS)
    with pytest.raises(UserError, match=sentence):
        PROVIDER.delete(made.id, made.outs)


def test_a_left_over_of_this_checkout_is_removed(engine: Engine, enter: Callable[[str], Path]) -> None:
    one = enter("one")
    assert not remove_left_over("acme", one)
    PROVIDER.create(PROPS)
    assert remove_left_over("acme", one)
    assert engine.containers == {}


def test_what_systemd_needs_of_each_engine() -> None:
    limits = ["--cap-add=SYS_ADMIN", *sandbox._LIMITS]
    assert machine_options(["/usr/bin/podman", "--runtime", "runc"]) == [
        "--systemd=always",
        "--security-opt=label=disable",
        *limits,
    ]
    assert machine_options(["/opt/podman-desktop/bin/docker"]) == [
        "--cgroupns=host",
        "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw",
        "--tmpfs=/run",
        "--tmpfs=/run/lock",
        "--security-opt=apparmor=unconfined",
        "--stop-signal=SIGRTMIN+3",
        *limits,
    ]


OFF = {**PROPS, "running": False}


def test_a_container_is_stopped_and_started_again(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    difference = PROVIDER.diff(made.id, made.outs, OFF)
    assert (difference.changes, difference.replaces or []) == (True, [])
    off = PROVIDER.update(made.id, made.outs, OFF).outs
    assert off == {**made.outs, "running": False}, "its ports stay known"
    assert not engine.containers[NAME]["State"]["Running"]
    assert PROVIDER.diff(made.id, off, OFF).changes is False

    difference = PROVIDER.diff(made.id, off, PROPS)
    assert (difference.changes, difference.replaces) == (True, [])
    on = PROVIDER.update(made.id, off, PROPS).outs
    assert on is not None
    assert "running" not in on
    assert on["started"] == "start 2"
    assert engine.containers[NAME]["Id"] == made.id
    assert PROVIDER.diff(made.id, on, PROPS).changes is False


def test_how_a_stopped_container_is_described_matters_when_it_is_to_run(
    engine: Engine, enter: Callable[[str], Path]
) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    off = PROVIDER.update(made.id, made.outs, {**OFF, "shmMiB": 512}).outs
    assert off is not None
    assert PROVIDER.diff(made.id, off, {**OFF, "shmMiB": 512}).changes is False
    difference = PROVIDER.diff(made.id, off, {**PROPS, "shmMiB": 512})
    assert difference.replaces == ["shmMiB", "container"]
    assert engine.containers[NAME]["Id"] == made.id


def test_a_stopped_container_that_somebody_starts_or_removes(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(PROPS)
    assert made.outs is not None
    off = PROVIDER.update(made.id, made.outs, OFF).outs
    assert off is not None
    engine.start(engine.containers[NAME])
    assert PROVIDER.diff(made.id, off, OFF).changes is True
    assert PROVIDER.update(made.id, off, OFF).outs == off
    assert not engine.containers[NAME]["State"]["Running"]

    del engine.containers[NAME]
    assert PROVIDER.diff(made.id, off, OFF).changes is False
    assert PROVIDER.update(made.id, off, OFF).outs == off
    assert PROVIDER.diff(made.id, off, PROPS).replaces == ["container"]
    PROVIDER.delete(made.id, off)


def test_a_container_that_is_off_from_the_beginning(engine: Engine, enter: Callable[[str], Path]) -> None:
    enter("one")
    made = PROVIDER.create(OFF)
    assert made.outs is not None
    assert not engine.containers[NAME]["State"]["Running"]
    bindings = engine.containers[NAME]["HostConfig"]["PortBindings"]
    assert made.outs["ssh_port"] == int(bindings["22/tcp"][0]["HostPort"])
    assert made.outs["endpoint_port"] == int(bindings["8000/tcp"][0]["HostPort"])
    assert PROVIDER.diff(made.id, made.outs, OFF).changes is False
    difference = PROVIDER.diff(made.id, made.outs, PROPS)
    assert (difference.changes, difference.replaces) == (True, [])
    assert PROVIDER.create(OFF).id == made.id


def test_one_that_runs_and_nobody_knows_of_is_stopped(engine: Engine, enter: Callable[[str], Path]) -> None:
    """An interrupted run left it."""
    enter("one")
    left = PROVIDER.create(PROPS)
    assert PROVIDER.create(OFF).id == left.id
    assert not engine.containers[NAME]["State"]["Running"]
