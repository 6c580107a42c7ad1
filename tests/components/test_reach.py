"""What a refresh makes of what a pod answers: each difference by its name, kept until the next update."""

from __future__ import annotations

import time
from typing import Any

import pytest

from components import ssh
from components.core.errors import UserError
from components.pods import reach
from components.pods.reach import OTHER, ReachedPodProvider
from components.ssh import Address, Greeting, OtherHostKey

CONNECTION = {
    "address": "10.0.0.7", "port": 22.0, "user": "ops", "hostKey": "ssh-ed25519 AAAA",
    "credential": "config:sshPrivateKey",
}  # fmt: skip
INPUTS: dict[str, Any] = {"engine": "acme-tiny", "connection": CONNECTION, "machine": None, "plugin_host_key": None}
OTHER_KEY = OtherHostKey(Address("10.0.0.7", 22, "ops", ""), "ssh-ed25519 AAAA", "ssh-rsa AAAB")


class Pod(ReachedPodProvider):
    """A provider whose one pod answers with `says`: a machine id and podctl's answer, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: tuple[str, Any] | UserError = ("0123", {"drift": {}})
        self.asked: list[str] = []
        monkeypatch.setattr(reach, "private_key_text", lambda *_: "a key")
        monkeypatch.setattr(reach, "_said", set())
        monkeypatch.setattr(ssh, "greet", self._greet)

    def settings(self) -> Any:
        return None

    async def _greet(self, _address: object, _key: str, question: str, _patience: float) -> Greeting:
        self.asked.append(question)
        if isinstance(self.says, UserError):
            raise self.says
        machine, answer = self.says
        return Greeting("ecdsa BBBB", machine, answer)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(monkeypatch)


def made(pod: Pod) -> dict[str, Any]:
    outs = pod.create(INPUTS).outs
    assert outs is not None
    return outs


FOUND = {"unit": "was edited by hand", "blob of acme-v1": "sha256:aa is gone"}


def test_what_a_refresh_finds_is_a_difference_until_the_next_update(
    pod: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(pod)
    pod.says = ("0123", {"drift": FOUND})

    read = pod.read("id", first)

    assert pod.asked[0] == "true", "to reach a pod asks it nothing"
    assert pod.asked[1].startswith("sudo -n python3 /var/lib/lora-pods/bin/podctl-")
    assert pod.asked[1].endswith(".py intact --engine acme-tiny")
    assert (read.outs, read.inputs) == ({**first, "drift": FOUND}, {**INPUTS, "drift": FOUND})
    for _ in range(2):  # of the refresh, and of the preview that follows it
        assert pod.diff("id", read.outs or {}, INPUTS).changes is True
    assert capsys.readouterr().err.splitlines() == [
        "drift of acme-tiny: unit: was edited by hand",
        "drift of acme-tiny: blob of acme-v1: sha256:aa is gone",
    ]
    monkeypatch.setattr(time, "strftime", lambda *_: "later")
    mended = pod.update("id", read.outs or {}, INPUTS).outs
    assert mended == {**first, "machine": "0123 reached later"}
    assert pod.diff("id", mended, INPUTS).changes is False


def test_what_is_as_it_was_left_is_no_difference(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(pod)
    for before in (first, {**first, "drift": FOUND}):
        read = pod.read("id", before)
        assert (read.outs, read.inputs) == (first, INPUTS), "also where somebody mended it by hand"
    assert pod.diff("id", first, INPUTS).changes is False
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (("4567", {}), {"machine": "is another one, 4567 in /etc/machine-id instead of 0123"}),
        (("0123", {}), {"podctl": "is not on the pod, or is another release's, or cannot be run there"}),
        (("0123", {"drift": {"a\x1b[2J": "b\nc"}}), {"a\\x1b[2J": "b\\nc"}),
        (OTHER_KEY, {"host key": str(OTHER_KEY)}),
    ],
)
def test_what_a_refresh_finds_otherwise(pod: Pod, says: Any, told: dict[str, str]) -> None:
    first = made(pod)
    pod.says = says
    assert pod.read("id", first).outs == {**first, "drift": told}


def test_a_pod_that_does_not_answer_was_not_looked_at(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(pod)
    pod.says = UserError("ops@10.0.0.7:22 cannot be reached for 10 s (no answer)")
    for before in (first, {**first, "drift": FOUND}):
        read = pod.read("id", before)
        assert (read.outs, read.inputs) == (before, None)
        reach._said.clear()
        assert capsys.readouterr().err == (
            "warning: the pod of acme-tiny was not looked at: ops@10.0.0.7:22 cannot be reached for 10 s (no answer)\n"
        )


def test_what_an_earlier_release_recorded_is_a_difference_still(pod: Pod) -> None:
    before = {**made(pod), "machine": OTHER}
    assert pod.diff("id", before, INPUTS).changes is True
    read = pod.read("id", before)
    assert read.outs == before, "no more is known than that"
