"""A stack whose machines are to be off: what is declared of it, what is said, and that no machine is asked."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from components import deployment, running, ssh
from components.core.errors import UserError
from components.pods import reach
from components.pods.reach import OTHER, ReachedPodProvider
from components.ssh import Greeting
from tests.components.graph import Last, Recorder, Registered, register
from tests.components.test_graph import BASE, one, project, stack_file

__all__ = ["project"]

TINY = "/models/tiny"
COMMANDS = ("prepare", "place", "secrets", "activate")
URN = "urn:pulumi:acme::lora-pods::lora-pods:index:Deployment$lora-pods:index:GpuPod$"
LEFT = [
    *(f"{URN}command:remote:Command::{TINY}-{verb}" for verb in COMMANDS),
    f"{URN}pulumi-python:dynamic/lora-pods:BundleUpload::{TINY}-upload",
]
ENGINE = {"unit": "lora-pods-tiny.service", "models": {"tiny-v1": "sha256:aa"}, "unitSha256": "bb"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(pulumi.log, "info", lambda text, **_: told.append(text))
    return told


def names(registered: list[Registered]) -> set[str]:
    return {item.name for item in registered}


def without_state(registered: list[Registered]) -> list[Registered]:
    return [item for item in registered if not item.name.endswith("-reach") and "Sandbox" not in item.type]


def test_machines_that_are_on_are_described_as_ever(project: Path) -> None:
    """A key more would be a difference in every stack."""
    registered, _ = register(stack_file())
    assert register(stack_file(running=True)) == (registered, register(stack_file())[1])
    for item in registered:
        assert "running" not in item.inputs


def test_only_machines_that_are_ours_are_switched_off(project: Path, told: list[str]) -> None:
    on, _ = register(stack_file())
    off, exported = register(stack_file(running=False), last=Last({TINY: ENGINE}, LEFT))
    assert {item.name: item.inputs["running"] for item in off if "running" in item.inputs} == {
        f"{TINY}-reach": False,
        "lora-pods-acme": False,
    }
    assert without_state(off) == without_state(on), "what is on the pod stays declared"
    assert exported["engines"][TINY] == {**ENGINE, "models": {TINY: None, "tiny-v1": "sha256:aa"}, "running": False}
    assert "running" not in exported["engines"][BASE]
    hosts = f"lora-pods:running is false; hosts are not ours to switch off, and go on: {BASE}"
    assert [text for text in told if "running" in text] == [hosts]


def test_what_never_came_to_a_pod_is_left_out_while_it_is_off(project: Path, told: list[str]) -> None:
    everything = names(register(stack_file())[0])
    on_it = {f"{TINY}-{part}" for part in (*COMMANDS, "upload")}
    off, exported = register(stack_file(running=False), last=Last({}, []))
    assert everything - names(off) == on_it
    assert exported["engines"].keys() == {BASE}
    assert told[-1] == f"nothing serves {TINY} yet; that begins once lora-pods:running is true"
    # Its first start failed: what is there has to stay declared, or it would be undone on a machine that is off.
    there = [urn for urn in LEFT if not urn.endswith(("-place", "-activate"))]
    off, _ = register(stack_file(running=False), last=Last({}, there))
    assert everything - names(off) == {f"{TINY}-place", f"{TINY}-activate"}


def test_everything_is_taken_to_be_there_where_nobody_can_tell(
    project: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda text, **_: warned.append(text))

    async def unknown() -> None:
        return None

    monkeypatch.setattr(deployment, "left_on_pods", lambda: None)
    monkeypatch.setattr(running, "last_outputs", unknown)
    off, exported = register(stack_file(running=False))
    assert names(off) == names(register(stack_file())[0])
    assert exported["engines"].keys() == {BASE}
    assert any(text.startswith("The stack's last outputs cannot be read") for text in warned)
    assert not any(text.startswith("nothing serves") for text in told)


def test_a_base_does_not_leave_a_sandbox_that_is_off(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands would be undone there, and fail in the words of an SSH library."""
    left = running.Left(frozenset({"/models/old-activate"}), frozenset({"/models/old"}))
    monkeypatch.setattr(deployment, "left_on_pods", lambda: left)
    with pytest.raises(UserError) as caught:
        register(stack_file(running=False))
    assert str(caught.value) == (
        "lora-pods:running is false, and /models/old left the stack file; what it has on the sandbox goes only while "
        "that is on: set lora-pods:running to true for this change, or put the pod back"
    )
    register(stack_file(running=True))


def test_what_a_pod_is_waited_for(project: Path) -> None:
    assert "patience" not in one(register(stack_file())[0], f"{TINY}-reach")


def test_what_is_left_on_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, Any] = {"outputs": {urn: {} for urn in [*LEFT, f"{URN.rstrip('$')}::{TINY}"]}}
    for base, credential in ((TINY, "sandbox:lora-pods-acme"), (BASE, "config:sshPrivateKey")):
        reached = f"{URN}pulumi-python:dynamic/lora-pods:ReachedPod::{base}-reach"
        answer["outputs"][reached] = {"outputs": {"connection": {"credential": credential}}}
    asked = []

    def invoke(token: str, arguments: dict[str, Any]) -> SimpleNamespace:
        asked.append((token, arguments))
        if not answer:
            raise RuntimeError("no such function")
        return SimpleNamespace(value=answer)

    pulumi.runtime.set_mocks(Recorder(), project="lora-pods", stack="acme", organization="organization")
    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    left = running.left_on_pods()
    assert left is not None
    assert left.names == frozenset(f"{TINY}-{part}" for part in (*COMMANDS, "upload"))
    assert left.sandboxed == {TINY}
    assert asked == [("pulumi:pulumi:readStackResourceOutputs", {"stackName": "organization/lora-pods/acme"})]
    answer.clear()
    assert running.left_on_pods() is None


PROPS: dict[str, Any] = {
    "engine": "acme-tiny",
    "connection": {
        "address": "10.0.0.7",
        "port": 22.0,
        "user": "root",
        "hostKey": "ssh-ed25519 AAAA",
        "credential": "config:sshPrivateKey",
    },
    "machine": None,
    "plugin_host_key": None,
}
OFF = {**PROPS, "running": False}


class Asked(ReachedPodProvider):
    """Counts the times that the pod is asked; each time it is the same machine, as the last activation left it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[float] = []
        monkeypatch.setattr(reach, "private_key_text", lambda *_: "a key")
        monkeypatch.setattr(ssh, "greet", self._greet)

    def settings(self) -> Any:
        return None

    async def _greet(self, _address: object, _key: str, _question: str, patience: float) -> Greeting:
        self.waited.append(patience)
        return Greeting("ecdsa BBBB", "0123", {"drift": {}})


def test_a_pod_that_is_switched_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Asked(monkeypatch)
    on = provider.create(PROPS).outs
    assert on is not None
    assert provider.waited == [60]
    assert on["machine"].startswith("0123 reached ")

    assert provider.diff("id", on, OFF).changes is True
    off = provider.update("id", on, OFF).outs
    assert off == {**on, "running": False}, "what is known of it stays"
    moved = {**OFF, "connection": {**OFF["connection"], "port": 23.0}}
    assert provider.diff("id", off, OFF).changes is False
    assert provider.diff("id", off, moved).changes is False
    assert provider.diff("id", {**off, "machine": OTHER}, OFF).changes is False
    read = provider.read("id", off)
    assert (read.id, read.outs) == ("id", off)
    assert provider.waited == [60]

    assert provider.diff("id", off, PROPS).changes is True
    monkeypatch.setattr(time, "strftime", lambda *_: "later")
    again = provider.update("id", off, PROPS).outs
    assert again is not None
    assert again["machine"] == "0123 reached later", "so that all that follows is made so again"
    assert "running" not in again
    assert provider.waited == [60, 60]


def test_a_pod_that_is_off_from_the_beginning_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Asked(monkeypatch)
    made = provider.create(OFF)
    assert made.outs == {
        **OFF,
        "machine": "switched off before it was ever reached",
        "plugin_host_key": "ssh-ed25519 AAAA",
    }
    assert provider.diff(made.id, made.outs, OFF).changes is False
    assert provider.diff(made.id, made.outs, PROPS).changes is True
    assert provider.waited == []


def test_a_kind_of_pod_says_how_long_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Asked(monkeypatch)
    made = provider.create({**PROPS, "patience": 600.0})
    assert made.outs is not None
    provider.update("id", made.outs, {**PROPS, "patience": 600.0})
    # A refresh asks machines that may well be off.
    provider.read("id", made.outs)
    assert provider.waited == [600, 600, 10]


def test_a_machine_that_restarts_under_the_same_address_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Asked(monkeypatch)
    made = provider.create({**PROPS, "incarnation": "i-1 g6e.xlarge"}).outs or {}
    assert provider.diff("id", made, {**PROPS, "incarnation": "i-1 g6e.xlarge"}).changes is False
    assert provider.diff("id", made, {**PROPS, "incarnation": "i-1 g6e.2xlarge"}).changes is True
