"""The probe: an engine counts only when each adapter answers otherwise than its base, unless that is allowed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import probe, proof, waiting
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_systemd import FakeSystemd, free_port
from tests.unit.podctl.pods import Answer, PodDirectory

BASE = "org/base"
FAR, NEAR = 0.1, 0.00001
AS_BASE = "m2 answers exactly as its base does: its tensors do not apply (names of another model?) or it is untrained"


def document(engine: Engine, answers: dict[str, Any], allow: list[str] | None = None, **behaviour: Any) -> Any:
    """Serves what `answers` names beside the base, which answers as it does itself."""
    wanted = engine.document(*sorted(set(answers) - {BASE}), answers={BASE: 0, **answers}, **behaviour)
    wanted["ready"]["probe"] = {"base": BASE, "mayEqualBase": allow or []}
    return wanted


def activate(engine: Engine, answers: dict[str, Any], allow: list[str] | None = None, **behaviour: Any) -> Answer:
    return engine.pod.run("activate", stdin=document(engine, answers, allow, **behaviour))


def asked(systemd: FakeSystemd) -> list[str]:
    server = systemd.units[UNIT].server
    assert server is not None
    return [request["model"] for request in server.asked]


def test_adapters_that_answer_otherwise_than_their_base(engine: Engine, systemd: FakeSystemd) -> None:
    answer = activate(engine, {"m1": FAR, "m2": 1})
    assert answer.lines == ["2 adapters answer otherwise than their base", f"{UNIT} serves 3 models"]
    assert answer.result == {
        "engine": ENGINE, "unit": UNIT, "generation": 1, "restarted": True, "probe": {"otherwise": 2, "equal": []},
    }  # fmt: skip
    # The base before and after, to tell the noise; one prompt is enough.
    assert asked(systemd) == [BASE, BASE, "m1", "m2", BASE]


def test_systemd_is_asked_no_oftener_for_more_adapters(engine: Engine, systemd: FakeSystemd) -> None:
    """It takes longer to answer than a small engine."""

    def looks(count: int) -> int:
        assert activate(engine, {f"m{number}": FAR for number in range(count)}).status == 0
        return systemd.units[UNIT].looks

    assert looks(2) == looks(20)


def test_an_engine_that_ended_after_its_last_answer(
    engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = "the engine ended (oom-kill)"
    monkeypatch.setattr(proof, "why_over", lambda *_, **__: over if len(asked(systemd)) == 5 else "")
    lines = activate(engine, {"m1": FAR, "m2": FAR}).lines
    assert lines[0].startswith(f"{UNIT} is not kept: {over}; nothing served before it")


def test_the_question_is_greedy_short_and_the_same_for_all(pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine = Engine(pod, free_port())
    pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": "the key"}})
    assert activate(engine, {"m1": FAR}, key="the key").status == 0
    server = systemd.units[UNIT].server
    assert server is not None
    questions = [{**request, "model": None} for request in server.asked]
    assert questions == [questions[0]] * len(questions)
    wanted = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4, "logprobs": 5}
    assert questions[0].items() >= {**wanted, "key": "Bearer the key"}.items()


def test_one_that_answers_as_its_base_brings_the_last_good_engine_back(
    engine: Engine, systemd: FakeSystemd, pod: PodDirectory
) -> None:
    activate(engine, {"m1": FAR})
    before = (pod.units / UNIT).read_text()

    answer = activate(engine, {"m1": FAR, "m2": NEAR})

    assert answer.status == 1
    assert answer.lines == [
        "1 adapter answers otherwise than its base",
        f"{UNIT} is not kept, so generation 1 comes back",
        f"{UNIT} is not kept: {AS_BASE}; mend it, or set mayEqualBase: true for it in the stack file; "
        "the unit from before serves again (m1, org/base)",
    ]
    assert (pod.units / UNIT).read_text() == before
    assert systemd.units[UNIT].active == "active"
    assert asked(systemd) == [], "what comes back was proven when it was new"


def test_suspects_alone_are_asked_again_with_other_prompts(engine: Engine, systemd: FakeSystemd) -> None:
    answer = activate(engine, {"m1": FAR, "m2": [0, FAR], "m3": [0, 0, FAR]})
    assert answer.lines[0] == "3 adapters answer otherwise than their base"
    every = [BASE, BASE, "m1", "m2", "m3", BASE]
    assert asked(systemd) == [*every, BASE, BASE, "m2", "m3", BASE, BASE, BASE, "m3", BASE]
    server = systemd.units[UNIT].server
    assert server is not None
    assert len({request["prompt"] for request in server.asked}) == 3


def test_a_first_engine_with_one_that_answers_as_its_base_is_taken_away(engine: Engine, pod: PodDirectory) -> None:
    answer = activate(engine, {"m2": 0})
    assert answer.lines == [
        f"{UNIT} is not kept: {AS_BASE}; mend it, or set mayEqualBase: true for it in the stack file; "
        "nothing served before it, so the unit is removed"
    ]
    assert not (pod.units / UNIT).exists()


def test_several_are_named_together_and_many_are_counted(engine: Engine) -> None:
    few = activate(engine, {"m1": 0, "m2": 0, "m3": FAR}).lines[-1]
    assert (
        "m1, m2 answer exactly as their base does: their tensors do not apply (names of another model?) or they are "
        "untrained; mend them, or set mayEqualBase: true for them in the stack file; nothing served"
    ) in few
    many = activate(engine, {f"m{n:03}": 0 for n in range(100)}).lines[-1]
    assert "m018, m019 and 80 more answer exactly as their base does" in many


def test_one_that_may_equal_its_base_is_noted(engine: Engine) -> None:
    answer = activate(engine, {"m1": FAR, "m2": 0}, allow=["m2"])
    assert answer.lines == [
        "1 adapter answers otherwise than its base",
        "m2 answers exactly as its base does, as mayEqualBase allows",
        f"{UNIT} serves 3 models",
    ]
    assert answer.result["probe"] == {"otherwise": 1, "equal": ["m2"]}


@pytest.mark.parametrize(
    ("base", "adapter", "equal"),
    [
        ([0, 0.02, 0], 0.05, True),
        ([0, 0.02, 0], 0.07, False),
        ([0, 0, 0.02], 0.05, True),
        ([0, 1, 0], 2.5, True),  # where even its tokens differ, other tokens say nothing
        (0, 0.00005, True),
        (0, 0.0002, False),
        (0, [0.01, 0.03], True),  # what is off by little and by something else when asked again
        (0, [0.01, 0.01], False),
        (0, [0.03, 0.01], False),
    ],
)
def test_what_one_differs_by_from_itself_is_noise(engine: Engine, base: Any, adapter: Any, equal: bool) -> None:
    answer = activate(engine, {BASE: base, "m1": adapter}, allow=["m1"])
    assert answer.result["probe"] == {"otherwise": int(not equal), "equal": ["m1"] if equal else []}


def top(*later: str, **logprobs: float) -> list[Any]:
    return [200, json.dumps({"choices": [{"logprobs": {"tokens": ["a", *later], "top_logprobs": [logprobs]}}]})]


@pytest.mark.parametrize(
    ("base", "adapter", "equal"),
    [
        (top(a=-0.5, b=-1.0, c=-4.0), top(a=-0.5, b=-1.0, d=-4.0), True),  # which of two alike is the last by chance
        (top(a=-0.5, b=-1.0, c=-4.0), top(a=-0.5, b=-1.0, d=-3.9), False),
        (top(a=-0.5, b=-1.0, c=-4.0), top(a=-0.5, d=-1.0, b=-4.0), False),
        (top("x", "y", a=-0.5, b=-1.0), top("x", "y", a=-0.5, b=-1.0), True),
        (top("x", "y", a=-0.5, b=-1.0), top("x", "z", a=-0.5, b=-1.0), False),
    ],
)
def test_tokens_that_only_one_of_them_has(engine: Engine, base: Any, adapter: Any, equal: bool) -> None:
    answer = activate(engine, {BASE: base, "m1": adapter}, allow=["m1"])
    assert answer.result["probe"]["equal"] == (["m1"] if equal else [])


ERROR = json.dumps({"error": {"message": "The model does not support Completions\x1b[2J API"}})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([404, '{"detail":"Not Found"}'], "answers 404 (Not Found)"),
        ([400, ERROR], "answers 400 (The model does not support Completions\\x1b[2J API)"),
        ([400, "no"], "answers 400"),
        ([200, "{}"], "answers something else than a completion with logprobs"),
        ([200, '{"choices": [{"logprobs": null}]}'], "answers something else than a completion with logprobs"),
        (top(), "answers something else than a completion with logprobs"),
    ],
)
def test_an_engine_that_has_no_completions_is_not_probed(engine: Engine, answer: list[Any], said: str) -> None:
    found = activate(engine, {BASE: answer, "m1": 0})
    assert found.lines == [
        f"the adapters of {UNIT} could not be compared with their base: org/base {said}",
        f"{UNIT} serves 2 models",
    ]
    assert found.result["probe"] == {"skipped": f"org/base {said}"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([500, '{"error":{"message":"broken"}}'], "m2 answers 500 (broken)"),
        ([404, '{"error":{"message":"The model `m2` does not exist."}}'], "m2 answers 404 (The model `m2` does not"),
        ([200, '{"choices":[]}'], "m2 answers something else than a completion with logprobs"),
        (top(a=float("nan")), "m2 answers something else than a completion with logprobs"),
        ("hangs", "m2 does not answer within 0 seconds"),
    ],
)
def test_an_adapter_that_does_not_answer_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3)
    found = activate(engine, {"m1": FAR, "m2": answer}, says=["INFO the journal"])
    assert found.status == 1
    sentence = found.lines.index(next(line for line in found.lines if f"{UNIT} is not kept: {said}" in line))
    assert found.lines[sentence + 1 :] == ["last lines of its journal:", f"  Started {UNIT}", "  INFO the journal"]


def test_others_are_not_asked_once_one_is_silent_or_many_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3)
    lines = activate(engine, {"m1": "hangs", "m2": [500, ""]}).lines
    assert f"{UNIT} is not kept: m1 does not answer within 0 seconds; nothing" in lines[0]
    lines = activate(engine, {f"m{n:03}": [500, ""] for n in range(100)}).lines
    assert "m018 answers 500, m019 answers 500; nothing served before it" in lines[0]


def test_both_kinds_of_faults_are_told_together(engine: Engine) -> None:
    (line,) = [x for x in activate(engine, {"m1": [500, ""], "m2": 0, "m3": [503, ""]}).lines if "is not kept: " in x]
    assert f"{UNIT} is not kept: m1 answers 500, m3 answers 503; {AS_BASE}; mend it" in line


def test_a_secret_in_an_error_is_not_shown(pod: PodDirectory, engine: Engine) -> None:
    pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": "hush", "HF_TOKEN": "hush hush"}})
    lines = activate(engine, {"m1": [500, '{"error":{"message":"not with hush hush"}}']}, key="hush").lines
    assert not [line for line in lines if "hush" in line]
    assert "m1 answers 500 (not with [secret])" in lines[0]


@pytest.mark.parametrize(("who", "said"), [("m2", "when m2 was asked"), (BASE, "when org/base was asked")])
def test_an_engine_that_ends_when_it_is_asked(engine: Engine, systemd: FakeSystemd, who: str, said: str) -> None:
    activate(engine, {"m1": FAR})
    says = ["(EngineCore pid=1) ERROR 11-30 02:50:41 [core.py:1] RuntimeError: No working C++ compiler found"]
    lines = activate(engine, {"m1": FAR, "m2": FAR, who: "dies"}, says=says).lines
    assert lines[1].startswith(
        f"{UNIT} is not kept: {said} for a completion, the engine ended (oom-kill): "
        "RuntimeError: No working C++ compiler found; the unit from before serves again"
    )
    assert systemd.units[UNIT].active == "active"


def test_a_base_that_fails_is_an_error(engine: Engine) -> None:
    lines = activate(engine, {BASE: [500, ""], "m1": FAR}).lines
    assert lines[0].startswith(f"{UNIT} is not kept: its base org/base answers 500; nothing served before it")


def test_it_takes_no_longer_than_loading_may(engine: Engine) -> None:
    wanted = document(engine, {"m1": FAR})
    wanted["ready"]["timeoutSeconds"] = 0
    lines = engine.pod.run("activate", stdin=wanted).lines
    assert "after 0 seconds" in lines[0]


def test_a_slow_answer_at_the_end_of_that_time_is_no_adapters_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = document(engine, {"m1": FAR, "m2": FAR})
    wanted["ready"]["timeoutSeconds"] = 1
    ask = proof.request

    def slow(url: str, path: str, key: str | None, document: Any, seconds: float, attended: bool) -> tuple[int, bytes]:
        if document is None:
            return ask(url, path, key, document, seconds, attended)
        time.sleep(seconds)
        return 0, b""

    monkeypatch.setattr(proof, "request", slow)
    lines = engine.pod.run("activate", stdin=wanted).lines
    assert "after 1 seconds some of its adapters were still not asked" in lines[0]


def test_an_interrupted_run_stops_asking(engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "deserted", lambda: bool(asked(systemd)))
    lines = activate(engine, {"m1": FAR, "m2": FAR}).lines
    assert lines[0].startswith(f"{UNIT} is not kept: the run that wanted it was interrupted; nothing served before it")


def test_many_adapters_are_told_of_now_and_then(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_SECONDS", 0.0)
    lines = activate(engine, {"m1": FAR, "m2": FAR}).lines
    assert f"comparing the adapters of {UNIT} with their base: 1 of 2" in lines
    monkeypatch.setattr(waiting, "SAY_SECONDS", 60.0)
    many = activate(engine, {f"m{n}": FAR for n in range(100)})
    assert many.lines == ["100 adapters answer otherwise than their base", f"{UNIT} serves 101 models"]


def test_other_names_of_the_base_are_no_adapters(engine: Engine, systemd: FakeSystemd) -> None:
    wanted = document(engine, {"m1": FAR, "plain": 0})
    text, models = wanted["unit"]["text"], wanted["ready"]["models"]
    wanted["unit"]["text"] = text.replace(f'"plain": "{engine.root}"', f'"plain": "{BASE}"')
    models.update({BASE: BASE, "plain": BASE})
    assert engine.pod.run("activate", stdin=wanted).result["probe"] == {"otherwise": 1, "equal": []}
    assert "plain" not in asked(systemd)


def test_without_a_demand_nothing_is_asked(engine: Engine, systemd: FakeSystemd) -> None:
    assert "probe" not in engine.activate().result
    assert asked(systemd) == []


def change(wanted: Any, probe: Any) -> Any:
    return {**wanted, "ready": {**wanted["ready"], "probe": probe}}


@pytest.mark.parametrize(
    ("first", "then", "asks"),
    [
        ([], [], False),
        ([], ["m2"], False),
        (["m2"], [], True),
        (["m2"], ["m1"], True),
        (None, [], True),
        ([], None, False),
        (["m2"], None, False),
    ],
)
def test_a_running_engine_is_asked_again_only_for_what_was_not_proven(
    engine: Engine, systemd: FakeSystemd, first: list[str] | None, then: list[str] | None, asks: bool
) -> None:
    wanted = document(engine, {"m1": FAR, "m2": FAR})
    demands = [allow if allow is None else {"base": BASE, "mayEqualBase": allow} for allow in (first, then)]
    engine.pod.run("activate", stdin=change(wanted, demands[0]))
    before = len(asked(systemd))
    answer = engine.pod.run("activate", stdin=change(wanted, demands[1]))
    assert (answer.status, answer.result["restarted"]) == (0, False)
    assert (len(asked(systemd)) > before) is asks
    assert ("probe" in answer.result) is asks


def test_a_running_engine_that_does_not_stand_a_new_demand_runs_on(engine: Engine, systemd: FakeSystemd) -> None:
    wanted = document(engine, {"m1": FAR, "m2": 0}, allow=["m2"])
    engine.pod.run("activate", stdin=wanted)
    starts = systemd.units[UNIT].starts
    for _ in range(2):
        answer = engine.pod.run("activate", stdin=change(wanted, {"base": BASE, "mayEqualBase": []}))
        assert answer.status == 1
        assert answer.lines[-1].startswith(f"{UNIT} runs on as it is, but {AS_BASE}; mend it")
    assert (systemd.units[UNIT].starts, systemd.units[UNIT].active) == (starts, "active")
    assert engine.pod.run("activate", stdin=wanted).result["restarted"] is False


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ({"base": "other", "mayEqualBase": []}, "the document's ready.probe.base must be one of its ready.models"),
        ({"base": BASE}, "the document's ready.probe.mayEqualBase is missing: it must be a list"),
        ([], "the document's ready.probe must be an object"),
    ],
)
def test_a_demand_that_makes_no_sense_is_refused(engine: Engine, tmp_path: Path, probe: Any, said: str) -> None:
    answer = engine.pod.run("activate", stdin=change(document(engine, {"m1": FAR}), probe))
    assert (answer.status, answer.lines) == (1, [said])


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of a server that answers a byte at a time, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_answer_that_never_ends_is_none(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    began = time.monotonic()
    proof.request(dripping, "/v1/completions", None, {}, 0.3, attended=True)
    assert time.monotonic() - began < 10


def test_nobody_waits_for_an_answer_that_nobody_wants(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "deserted", lambda: True)
    began = time.monotonic()
    proof.request(dripping, "/v1/completions", None, {}, 100, attended=True)
    assert time.monotonic() - began < 10
