"""Going back by hand: what served before serves again, proven, or what serves goes on; either is told."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import activation, files, probe, proof, waiting
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_systemd import FakeSystemd
from tests.unit.podctl.pods import Answer, PodDirectory, bundle
from tests.unit.podctl.test_podctl_activate import KILL, RESTART, generations, set_secrets
from tests.unit.podctl.test_podctl_drift import drift, remove_blob


def rollback(pod: PodDirectory) -> Answer:
    return pod.run("rollback", "--engine", ENGINE)


def retrain(engine: Engine, weights: bytes) -> str:
    """Another adapter in the place of the one before, as an `up` leaves it."""
    engine.digest = engine.pod.stage(bundle(weights))
    engine.root = str(engine.pod.blob(engine.digest))
    engine.pod.place({"m1": engine.digest})
    return engine.digest


def unit(pod: PodDirectory) -> str:
    return (pod.units / UNIT).read_text()


def test_what_served_before_serves_again(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    first = engine.digest
    engine.activate("m1", "gone")
    before = unit(pod)
    second = retrain(engine, b"second")
    document = engine.document("m1", "new")
    pod.run("activate", stdin=document)

    answer = rollback(pod)

    assert (answer.status, answer.lines) == (0, [f"{UNIT} serves 3 models"])
    assert answer.result == {
        "engine": ENGINE, "unit": UNIT,
        "models": {"m1": first, "gone": first, "org/base": None},
        "before": {"m1": second, "new": second, "org/base": None},
    }  # fmt: skip
    assert unit(pod) == before
    assert generations(pod) == {3: True}, "what was rolled back is not kept for going back"
    assert {first, second} <= pod.blobs(), "and yet the next update has nothing to send"
    assert drift(pod) == {
        "rollback": "what was activated before the last activation serves again",
        "model gone": "is served since the rollback",
        "model m1": f"serves {first[7:19]} instead of {second[7:19]} since the rollback",
        "model new": "is not served since the rollback",
    }

    assert pod.run("activate", stdin=document).result["restarted"] is True
    assert (drift(pod), generations(pod)) == ({}, {3: True, 4: True})


def test_a_stack_file_that_follows_restarts_nothing(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    wanted = engine.document()
    pod.run("activate", stdin=wanted)
    retrain(engine, b"second")
    engine.activate()
    rollback(pod)
    pod.place({"m1": pod_digest(wanted)})
    assert pod.run("activate", stdin=wanted).result["restarted"] is False
    assert drift(pod) == {}


def pod_digest(document: dict[str, Any]) -> str:
    return "sha256:" + Path(document["ready"]["models"]["m1"]).name


def test_twice_goes_back_twice_and_differs_from_what_pulumi_knows(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    digests = [engine.digest]
    engine.activate()
    for weights in (b"second", b"third"):
        digests.append(retrain(engine, weights))
        engine.activate()
    assert rollback(pod).result["models"]["m1"] == digests[1]
    assert rollback(pod).result == {
        "engine": ENGINE, "unit": UNIT,
        "models": {"m1": digests[0], "org/base": None}, "before": {"m1": digests[1], "org/base": None},
    }  # fmt: skip
    assert drift(pod)["model m1"] == f"serves {digests[0][7:19]} instead of {digests[2][7:19]} since the rollback"
    answer = rollback(pod)
    assert (answer.status, answer.lines) == (1, [f"nothing is kept on this pod that engine {ENGINE} served before"])


def test_the_secrets_of_that_time_come_with_it(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate(revision=set_secrets(pod, VLLM_API_KEY="old"), key="old")
    engine.activate("m1", "m2", revision=set_secrets(pod, VLLM_API_KEY="new"), key="new")
    assert rollback(pod).status == 0
    assert 'VLLM_API_KEY="old"' in (pod.root / "secrets" / f"{ENGINE}.env").read_text()


def test_what_does_not_serve_any_more_gives_way_to_what_served(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate("m1")
    engine.activate("m1", "m2")
    kept = unit(pod)
    old = pod.root / "units" / ENGINE / "1" / "unit"
    text = old.read_text()
    does = json.loads(text.splitlines()[0].removeprefix("# fake: "))
    old.write_text(text.replace(json.dumps(does), json.dumps({**does, "die": ["OSError: no such base"]})))

    answer = rollback(pod)

    assert (answer.status, answer.result) == (1, {})
    assert answer.lines[1].startswith(
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: no such base; "
        "the unit from before serves again (m1, m2, org/base)"
    )
    assert (unit(pod), generations(pod), drift(pod)) == (kept, {1: True, 2: True}, {})


def test_a_full_disk_leaves_what_served(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate(revision=set_secrets(pod, VLLM_API_KEY="old"), key="old")
    engine.activate("m1", "m2", revision=set_secrets(pod, VLLM_API_KEY="new"), key="new")
    kept, real = unit(pod), files.write_file

    def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
        if path.endswith("/" + UNIT):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        real(path, data, mode)

    monkeypatch.setattr(files, "write_file", write_file)
    assert rollback(pod).lines[-1].startswith(f"the disk of {pod.root} is full: ")
    assert (unit(pod), systemd.units[UNIT].starts) == (kept, 2)
    assert (generations(pod), drift(pod)) == ({1: True, 2: True}, {}), "with the secrets it has"


@pytest.mark.parametrize("activations", [0, 1])
def test_nothing_to_go_back_to(activations: int, engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    for _ in range(activations):
        engine.activate()
    calls = list(systemd.calls)
    answer = rollback(pod)
    assert (answer.status, answer.lines) == (1, [f"nothing is kept on this pod that engine {ENGINE} served before"])
    assert systemd.calls == calls


def test_a_blob_that_is_gone_is_told_before_anything_is_stopped(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    first = engine.digest
    engine.activate()
    retrain(engine, b"second")
    engine.activate()
    remove_blob(pod, first)
    calls = list(systemd.calls)
    answer = rollback(pod)
    assert answer.lines == [f"{first} (m1), which was served before, is not on this pod any more"]
    assert (answer.status, systemd.calls, drift(pod)) == (1, calls, {})


def test_what_only_mended_the_pod_is_no_step_to_go_back_to(engine: Engine, pod: PodDirectory) -> None:
    engine.activate()
    before = unit(pod)
    retrain(engine, b"second")
    engine.activate()
    (pod.units / UNIT).write_text("[Service]\n")
    engine.activate()
    assert generations(pod) == {1: True, 3: True}
    rollback(pod)
    assert unit(pod) == before


def test_what_was_activated_twice_in_a_row_is_one_step(
    engine: Engine, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier release left it, or an activation that was killed before it tidied up."""
    monkeypatch.setattr(activation, "tidy", lambda *_: None)
    engine.activate()
    before = unit(pod)
    retrain(engine, b"second")
    engine.activate()
    (pod.units / UNIT).write_text("[Service]\n")
    engine.activate()
    assert generations(pod) == {1: True, 2: True, 3: True}
    assert rollback(pod).status == 0
    assert unit(pod) == before


def test_what_never_served_is_not_asked_to_stop(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")
    engine.activate("m1", "m2")
    systemd.calls.clear()
    faults = ["after 1800 seconds it was still not ready", ""]
    monkeypatch.setattr(proof, "await_ready", lambda *_, **__: faults.pop(0))
    monkeypatch.setattr(proof, "listens", lambda _: False)
    assert rollback(pod).status == 1
    assert systemd.calls == [*RESTART, *KILL, *RESTART]


def test_nothing_goes_back_for_somebody_who_is_gone(
    engine: Engine, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")
    engine.activate("m1", "m2")
    kept = unit(pod)
    gone: list[str] = []

    def proven(*_: object) -> tuple[str, bool, dict[str, Any]]:
        gone.append("whoever asked")
        return "", False, {}

    monkeypatch.setattr(probe, "prove", proven)
    monkeypatch.setattr(waiting, "deserted", lambda: bool(gone))
    assert rollback(pod).lines[-1] == (
        f"{UNIT} is not kept: the run that wanted it was interrupted; "
        "the unit from before serves again (m1, m2, org/base)"
    )
    assert (unit(pod), generations(pod)) == (kept, {1: True, 2: True})
