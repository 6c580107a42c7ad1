"""Engines: started only when something changed, proven before they count, put back when the new one does not serve."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import activation, files, names, probe, programs, proof, waiting
from components.on_pod.podctl.programs import Ran
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_systemd import FakeSystemd, FakeUnit, serve
from tests.unit.podctl.pods import PodDirectory, bundle, digest_of, mode

RESTART = [f"enable --no-reload {UNIT}", "daemon-reload", f"reset-failed {UNIT}", f"restart {UNIT}"]
KILL = [f"--no-block stop {UNIT}", f"kill --signal=KILL {UNIT}"]
SERVES = f"{UNIT} serves 2 models"
TAKEN_AWAY = [f"disable --now {UNIT}", f"reset-failed {UNIT}", "daemon-reload"]


@pytest.fixture
def real_run() -> Callable[..., Ran]:
    return programs.run  # without the fixtures that replace it


def activated(n: int, restarted: bool) -> dict[str, object]:
    return {"engine": ENGINE, "unit": UNIT, "generation": n, "restarted": restarted}


def set_secrets(pod: PodDirectory, **secrets: str) -> int:
    revision: int = pod.run("secrets", stdin={"engine": ENGINE, "secrets": secrets}).result["revision"]
    return revision


def secrets_in_force(pod: PodDirectory) -> Path:
    return pod.root / "secrets" / f"{ENGINE}.env"


def kept_revisions(pod: PodDirectory) -> set[int]:
    return {int(path.name.split(".")[1]) for path in (pod.root / "secrets").glob(f"{ENGINE}.*.env")}


def generations(pod: PodDirectory) -> dict[int, bool]:
    """Generation → whether it is proven."""
    found = {int(path.name): (path / "proven").exists() for path in (pod.root / "units" / ENGINE).glob("*")}
    return dict(sorted(found.items()))


def test_the_first_activation_installs_starts_and_proves(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    document = engine.document(polls=3)

    answer = pod.run("activate", stdin=document)

    assert answer == (0, activated(1, restarted=True), [SERVES])
    assert systemd.calls == RESTART
    assert (pod.units / UNIT).read_text() == document["unit"]["text"]
    assert generations(pod) == {1: True}
    assert (pod.root / "units" / ENGINE / "1" / "unit").read_text() == document["unit"]["text"]
    kept = json.loads((pod.root / "units" / ENGINE / "1" / "doc.json").read_text())
    assert kept == {**document, "unit": {"name": UNIT}, "secretsRevision": 0}
    assert not list(pod.root.glob(".lock*"))


def test_the_same_again_restarts_nothing(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate()
    systemd.calls.clear()
    document = engine.document()
    document["identity"], document["ready"]["timeoutSeconds"] = "the same pod under another name", 30

    answer = pod.run("activate", stdin=document)

    assert answer == (0, activated(1, restarted=False), [SERVES])
    assert systemd.calls == []
    assert generations(pod) == {1: True}
    kept = json.loads((pod.root / "units" / ENGINE / "1" / "doc.json").read_text())
    assert kept["ready"]["timeoutSeconds"] == 30


@pytest.mark.parametrize(
    "change",
    ["text", "secretsRevision", "secrets edited by hand", "stopped", "edited by hand", "removed by hand"],
)
def test_what_changed_is_restarted(change: str, engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate()
    systemd.calls.clear()
    document = engine.document()
    if change == "text":
        document["unit"]["text"] += "# another\n"
    elif change == "secretsRevision":
        document["secretsRevision"] = set_secrets(pod, HF_TOKEN="hf_other")
    elif change == "secrets edited by hand":
        secrets_in_force(pod).write_text('# revision 0\nVLLM_API_KEY="mine"\n')
    elif change == "stopped":
        systemd.run("systemctl", "--no-pager", "disable", "--now", UNIT)
        systemd.calls.clear()
    elif change == "edited by hand":
        (pod.units / UNIT).write_text("mine")
    else:
        (pod.units / UNIT).unlink()

    answer = pod.run("activate", stdin=document)

    assert answer == (0, activated(2, restarted=True), [SERVES])
    assert systemd.calls == RESTART
    assert (pod.units / UNIT).read_text() == document["unit"]["text"]
    another = change in ("text", "secretsRevision")  # the rest is what was asked for before, and no step to go back to
    assert generations(pod) == ({1: True, 2: True} if another else {2: True})


def test_an_unchanged_engine_that_does_not_answer_is_restarted(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate()
    running = systemd.units[UNIT].server
    assert running is not None
    running.shutdown()
    running.server_close()
    systemd.units[UNIT].server = serve({"serve": {}, "health": 503, "port": engine.port})
    document = engine.document()
    document["ready"]["timeoutSeconds"] = 0.2

    answer = pod.run("activate", stdin=document)

    assert answer.result == activated(2, restarted=True)
    assert answer.lines == [
        "the engine runs but is not ready, so it is started again: "
        "after 0 seconds it was still not ready: /health answers 503",
        SERVES,
    ]


def test_a_unit_that_fails_gives_way_to_the_last_good_one(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate()
    good = (pod.units / UNIT).read_text()
    systemd.calls.clear()
    systemd.lag = 2

    lines = engine.fails(
        die=[
            "INFO 11-30 12:00:00 [api_server.py:100] starting",
            "\x1b[31mERROR 11-30 12:00:01 [core.py:99] ValueError: LoRA rank 64 is greater than max_lora_rank\x1b[0m",
            "ERROR 11-30 12:00:02 [core.py:100] ValueError: LoRA rank 64 is greater than max_lora_rank",
            "RuntimeError: Engine core initialization failed",
            "bell\x07and\x1b]0;title",
        ]
    )

    cause = "ValueError: LoRA rank 64 is greater than max_lora_rank"
    assert lines == [
        f"{UNIT} did not become ready, so generation 1 comes back",
        f"{UNIT} did not become ready: the engine ended (oom-kill): {cause}; "
        "the unit from before serves again (m1, org/base)",
        "errors in its journal:",
        f"  ERROR 11-30 12:00:01 [core.py:99] {cause}",
        "  RuntimeError: Engine core initialization failed",
        "last lines of its journal:",
        f"  Started {UNIT}",
        "  INFO 11-30 12:00:00 [api_server.py:100] starting",
        f"  ERROR 11-30 12:00:01 [core.py:99] {cause}",
        f"  ERROR 11-30 12:00:02 [core.py:100] {cause}",
        "  RuntimeError: Engine core initialization failed",
        "  bell\\x07and\\x1b]0;title",
    ]
    assert systemd.calls == RESTART + RESTART
    assert (pod.units / UNIT).read_text() == good
    assert generations(pod) == {1: True}
    assert systemd.units[UNIT].active == "active"

    # And nothing is left to do for who goes back to the old document.
    systemd.calls.clear()
    assert engine.activate().result == activated(1, restarted=False)
    assert systemd.calls == []


def test_a_restart_loop_is_a_failure_and_not_a_wait(engine: Engine) -> None:
    engine.activate()

    began = time.monotonic()
    lines = engine.fails(timeout=30, crash=["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"])

    assert time.monotonic() - began < 20
    assert lines[1] == (
        f"{UNIT} did not become ready: the engine ended (exit-code) and would be started over and over: "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; "
        "the unit from before serves again (m1, org/base)"
    )


def test_a_restart_between_two_looks_is_a_failure_too(engine: Engine, systemd: FakeSystemd) -> None:
    def restarted(unit: FakeUnit) -> None:
        unit.restarts += 1

    systemd.on_look = [lambda unit: None] * 5 + [restarted]

    lines = engine.fails(timeout=30, hang=True, polls=10**9)

    assert lines[0] == (
        f"{UNIT} did not become ready: the engine ended (success) and would be started over and over; "
        "nothing served before it, so the unit is removed"
    )


def test_an_engine_that_is_stopping_does_not_count(engine: Engine, systemd: FakeSystemd) -> None:
    def stopping(unit: FakeUnit) -> None:
        unit.active, unit.sub = "deactivating", "stop-sigterm"

    systemd.on_look = [lambda unit: None, lambda unit: None, stopping]

    lines = engine.fails(timeout=0.2)

    assert "it was still not ready: the unit is deactivating (stop-sigterm); " in lines[0]


def test_somebody_elses_restart_is_told_apart(engine: Engine, systemd: FakeSystemd) -> None:
    def restarted(unit: FakeUnit) -> None:
        unit.invocation = "by hand"

    systemd.on_look = [lambda unit: None] * 5 + [restarted]

    lines = engine.fails(timeout=30, hang=True, polls=10**9)

    assert lines[0] == (
        f"{UNIT} did not become ready: the unit was started again by somebody else; "
        "nothing served before it, so the unit is removed"
    )


def test_an_engine_that_never_answers_is_given_up(engine: Engine) -> None:
    engine.activate()

    lines = engine.fails(timeout=0.3, hang=True, polls=10**9)

    assert lines[1] == (
        f"{UNIT} did not become ready: after 0 seconds it was still not ready: nothing answers at "
        f"http://127.0.0.1:{engine.port}; the unit from before serves again (m1, org/base)"
    )


def test_what_never_served_is_not_asked_to_stop(engine: Engine, systemd: FakeSystemd) -> None:
    """While vLLM loads, it does not hear the order: what served before would come back 90 seconds later."""
    engine.activate("m1")
    systemd.calls.clear()
    engine.fails(timeout=0.3, polls=10**9)
    assert systemd.calls == [*RESTART, *KILL, *RESTART]


def test_what_takes_connections_is(engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine may be slow to answer."""
    engine.activate("m1")
    systemd.calls.clear()
    monkeypatch.setattr(proof, "listens", lambda _: True)
    engine.fails(timeout=0.3, polls=10**9)
    assert systemd.calls == [*RESTART, *RESTART]


def test_who_takes_connections(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    assert not proof.listens(url)
    with socket.create_server(("127.0.0.1", port)):
        assert proof.listens(url), "though nobody accepts them yet"


@pytest.fixture
def loading(engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One that serves, and whose next unit a run that was killed left loading."""

    def killed(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    engine.activate("m1")
    with monkeypatch.context() as patch:
        patch.setattr(proof, "await_ready", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.activate("m1", "m2", polls=10**9)
    systemd.calls.clear()
    return engine


def test_nor_is_what_a_killed_run_left_loading(loading: Engine, systemd: FakeSystemd) -> None:
    assert loading.activate("m1").status == 0
    assert systemd.calls == [*KILL, *RESTART]


def test_nor_is_it_where_the_engine_goes(loading: Engine, systemd: FakeSystemd, pod: PodDirectory) -> None:
    assert pod.run("deactivate", "--engine", ENGINE).status == 0
    assert systemd.calls == [*KILL, *TAKEN_AWAY]


def test_what_serves_is_let_finish_though_a_killed_run_wrote_of_another(
    engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its generation and the restart, with another port."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    engine.activate("m1")
    engine.activate("m1", "m2")
    document = engine.document("m1")
    document["ready"]["url"] = "http://127.0.0.1:1"
    with monkeypatch.context() as patch:
        patch.setattr(activation, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.pod.run("activate", stdin=document)
    systemd.calls.clear()
    assert engine.activate("m1").status == 0
    assert systemd.calls == RESTART


def test_a_refused_unit_is_told_by_systemd_and_not_by_the_run_before(engine: Engine, systemd: FakeSystemd) -> None:
    engine.activate()
    systemd.journals[f"{UNIT}-1"].append("ValueError: of the run before")

    lines = engine.fails(refuse=f"Failed to restart {UNIT}: Unit {UNIT} has a bad unit file setting.\nSee system logs.")

    assert lines == [
        f"{UNIT} did not become ready, so generation 1 comes back",
        f"{UNIT} did not become ready: Failed to restart {UNIT}: Unit {UNIT} has a bad unit file setting.; "
        "the unit from before serves again (m1, org/base)",
        "last lines of its journal:",
        "  systemd: the unit's text is wrong",
    ]


WRAPPED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                "(APIServer pid=1) WARNING 11-30 02:50:40 [launcher.py:20] this can cause fd limit errors like "
                "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
                "(EngineCore pid=123) INFO 11-30 02:50:41 [core.py:9] was ValueError: before",
                "(EngineCore pid=123) ERROR 11-30 02:50:41 [core.py:1044] Traceback (most recent call last):",
                "(EngineCore pid=123) ERROR 11-30 02:50:41 [core.py:1044]     raise ValueError('DoRA')",
                "(EngineCore pid=123) ERROR 11-30 02:50:41 [core.py:1044] ValueError: vLLM does not yet support DoRA",
                f"(APIServer pid=1) {WRAPPED}",
            ],
            "ValueError: vLLM does not yet support DoRA",
        ),
        (
            ["KeyError: 'first'", "The above exception caused another:", "ValueError: last", WRAPPED],
            "ValueError: last",
        ),
        (
            [
                "ERROR 11-30 02:50:41 [v1/executor.py:7] RuntimeError: Worker failed with error 'CUDA out of memory'",
                "Exception: WorkerProc initialization failed due to an exception in a background process.",
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
            ],
            "RuntimeError: Worker failed with error 'CUDA out of memory'",
        ),
        (["Exit", WRAPPED], WRAPPED),
        (["INFO:     Started server process [1]", "WARNING:  ValueError: harmless"], ""),
    ],
)
def test_the_cause_is_the_last_exception_that_says_something(lines: list[str], cause: str, engine: Engine) -> None:
    found = engine.fails(die=lines)

    assert found[0] == (
        f"{UNIT} did not become ready: the engine ended (oom-kill){': ' if cause else ''}{cause}; "
        "nothing served before it, so the unit is removed"
    )
    errors = found[found.index("errors in its journal:") : found.index("last lines of its journal:")] if cause else []
    assert not [line for line in errors if "WARNING" in line or "INFO" in line]


@pytest.mark.parametrize("process", ["", "(APIServer pid=1) "])
def test_a_flag_that_vllm_does_not_know_is_the_cause(process: str, engine: Engine) -> None:
    usage = [
        "usage: api_server.py [-h] [--headless] [--log-error-stack]",
        *(f"                     [--kind{n} {{error: {n},Failed}}]" for n in range(40)),
    ]
    error = "api_server.py: error: unrecognized arguments: --enforce-eagr"

    assert engine.fails(die=[process + line for line in [*usage, error]]) == [
        f"{UNIT} did not become ready: the engine ended (oom-kill): {error}; "
        "nothing served before it, so the unit is removed",
        "errors in its journal:",
        f"  {process}{error}",
        "last lines of its journal:",
        f"  Started {UNIT}",
        f"  {process}{error}",
    ]


def test_a_program_that_cannot_start_is_named(engine: Engine, systemd: FakeSystemd) -> None:
    systemd.lag = 0
    lines = engine.fails(refuse=f"Job for {UNIT} failed because the control process exited with error code.\nSee")

    assert lines[0] == (
        f"{UNIT} did not become ready: its program could not be started; "
        "nothing served before it, so the unit is removed"
    )


def test_a_first_engine_that_fails_leaves_no_unit(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    lines = engine.fails(crash=["OSError: no model"])

    assert lines[0] == (
        f"{UNIT} did not become ready: the engine ended (exit-code) and would be started over and over: "
        "OSError: no model; nothing served before it, so the unit is removed"
    )
    assert systemd.calls == RESTART + TAKEN_AWAY
    assert list(pod.units.iterdir()) == []
    assert not (pod.root / "units" / ENGINE).exists()


def test_when_the_old_one_does_not_come_back_either_that_is_said(engine: Engine, systemd: FakeSystemd) -> None:
    engine.activate()
    generation = engine.pod.root / "units" / ENGINE / "1" / "unit"
    generation.write_text(f"# fake: {json.dumps({'die': []})}")

    lines = engine.fails(die=["OSError: no model"])

    assert lines[1] == (
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: no model; "
        "the unit from before did not come back either: the engine ended (oom-kill)"
    )


def test_the_list_of_what_serves_stays_short(engine: Engine) -> None:
    engine.activate(*"abcdefgh")

    assert engine.fails(die=[])[1].endswith("the unit from before serves again (a, b, c, d, e, ...)")


def test_a_run_killed_before_the_proof_is_made_good_by_the_next(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")

    def killed(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(proof, "await_ready", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.activate("m1", "m2")
    assert generations(pod) == {1: True, 2: False}
    systemd.calls.clear()

    answer = engine.activate("m1", "m2")

    assert answer.result == activated(3, restarted=True)
    assert systemd.calls == RESTART
    assert generations(pod) == {1: True, 3: True}


def test_what_a_killed_run_started_is_never_gone_back_to(
    engine: Engine, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")
    good = (pod.units / UNIT).read_text()

    def killed(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(proof, "await_ready", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.activate("m1", "m2")

    engine.fails(die=[])

    assert (pod.units / UNIT).read_text() == good
    assert generations(pod) == {1: True}


def test_three_good_generations_are_kept(engine: Engine, pod: PodDirectory) -> None:
    for last in range(5):
        engine.activate("m1", f"v{last}")

    assert generations(pod) == {3: True, 4: True, 5: True}


def test_generations_keep_their_blobs_and_lose_them_in_the_end(engine: Engine, pod: PodDirectory) -> None:
    engine.activate()
    new = pod.stage(bundle(b"retrained"))
    assert pod.place({"m1": new}).result["collected"] == []
    old, engine.root = engine.digest, str(pod.blob(new))
    for last in range(3):
        assert pod.blobs() == {old, new}
        engine.activate("m1", f"v{last}")
    assert pod.blobs() == {new}


@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ({"health": 503}, "/health answers 503"),
        ({"serve": {"org/base": "org/base"}}, "/v1/models does not list m1"),
        ({"body": "<html>"}, "/v1/models answers something else than a list of models"),
        ({"body": '{"data": [{"root": "x"}]}'}, "/v1/models answers something else than a list of models"),
        ({"body": "[" * 100_000}, "/v1/models answers something else than a list of models"),
        ({"key": "another"}, "/v1/models wants an API key"),
    ],
)
def test_what_is_not_ready_is_said(behaviour: dict[str, Any], fault: str, engine: Engine) -> None:
    lines = engine.fails(timeout=0.2, **behaviour)

    assert lines[0] == (
        f"{UNIT} did not become ready: after 0 seconds it was still not ready: {fault}; "
        "nothing served before it, so the unit is removed"
    )


def test_a_model_too_many_is_not_ready(engine: Engine) -> None:
    extra = {"m1": engine.root, "m2": engine.root, "m3": engine.root, "org/base": "org/base"}

    lines = engine.fails(timeout=0.2, serve=extra)

    assert "/v1/models lists m3, which is not declared" in lines[0]


def test_a_model_from_another_blob_is_not_ready(engine: Engine) -> None:
    other = {"m1": "/elsewhere", "m2": engine.root, "org/base": "org/base"}

    lines = engine.fails(timeout=0.2, serve=other)

    assert f"/v1/models lists m1 from /elsewhere instead of {engine.root}" in lines[0]


def test_the_api_key_is_taken_from_the_secrets(engine: Engine, pod: PodDirectory) -> None:
    set_secrets(pod, VLLM_API_KEY="sk-canary")

    assert engine.activate(key="sk-canary").status == 0
    lines = engine.fails(timeout=0.2, key="sk-other")
    assert "/v1/models refuses the API key in the secrets" in lines[1]
    assert "canary" not in "".join(lines)


def test_another_programs_answer_is_no_proof(engine: Engine, systemd: FakeSystemd) -> None:
    """Something that answers rightly on the port, while the unit that should is down."""
    engine.activate()
    document = engine.document("m1", "m2", die=["OSError: address already in use"])
    server = systemd.units[UNIT].server
    assert server is not None
    systemd.units[UNIT].server = None
    server.shutdown()
    server.server_close()
    systemd.units[UNIT].behaviour["polls"] = 10**9
    other = serve({"serve": dict.fromkeys(["m1", "m2", "org/base"], engine.root), "port": engine.port})
    try:
        answer = engine.pod.run("activate", stdin={**document, "ready": {**document["ready"], "timeoutSeconds": 0.2}})
    finally:
        other.shutdown()
        other.server_close()
    assert answer.status == 1
    assert answer.lines[1] == (
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: address already in use; "
        "the unit from before did not come back either: the engine ended (exit-code)"
    )


def test_a_port_that_a_foreign_program_has_is_refused(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    other = serve({"serve": {}, "port": engine.port})
    before = pod.snapshot()
    try:
        answer = engine.activate()
    finally:
        other.shutdown()
        other.server_close()
    assert (answer.status, answer.lines) == (
        1,
        [f"another program already answers at http://127.0.0.1:{engine.port}: stop it, or choose another engine.port"],
    )
    assert (pod.snapshot(), systemd.calls) == (before, [])


OTHER, OTHER_UNIT = "prod-base-0", "lora-pods-prod-base-0.service"


def test_another_engine_of_the_stack_on_the_port_gives_way(engine: Engine, systemd: FakeSystemd) -> None:
    engine.activate(engine=OTHER)
    systemd.calls.clear()

    answer = engine.activate()

    assert answer == (
        0,
        activated(1, restarted=True),
        [f"stopping {OTHER_UNIT}, which has this port in this stack", SERVES],
    )
    assert systemd.calls == [f"disable --now {OTHER_UNIT}", *RESTART]
    assert (systemd.units[OTHER_UNIT].active, systemd.units[OTHER_UNIT].enabled) == ("inactive", False)
    # It stays so when the next activation fails: it was not running any more.
    engine.fails(die=[])
    assert systemd.units[OTHER_UNIT].active == "inactive"


def test_the_engine_that_gave_way_comes_back(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate(engine=OTHER)
    systemd.calls.clear()

    lines = engine.fails(die=["OSError: no model"])

    assert lines == [
        f"stopping {OTHER_UNIT}, which has this port in this stack",
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: no model; {OTHER_UNIT} was started again",
        "errors in its journal:",
        "  OSError: no model",
        "last lines of its journal:",
        f"  Started {UNIT}",
        "  OSError: no model",
    ]
    assert systemd.calls == [f"disable --now {OTHER_UNIT}", *RESTART, *TAKEN_AWAY, f"enable --now {OTHER_UNIT}"]
    assert (systemd.units[OTHER_UNIT].active, systemd.units[OTHER_UNIT].enabled) == ("active", True)
    assert [path.name for path in pod.units.iterdir()] == [OTHER_UNIT]


def test_a_port_of_another_stack_is_refused(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    theirs = {**engine.document(engine=OTHER), "stack": "theirs"}
    assert pod.run("activate", stdin=theirs).status == 0
    systemd.calls.clear()
    before = pod.snapshot()

    answer = engine.activate()

    assert (answer.status, answer.lines) == (
        1,
        [f"port {engine.port} belongs to the engine {OTHER} of stack theirs: choose another engine.port"],
    )
    assert (pod.snapshot(), systemd.calls) == (before, [])


def test_a_blob_that_is_not_here_is_refused(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    nowhere = "9" * 64
    document = engine.document()
    document["unit"]["text"] += f"# {pod.root}/blobs/sha256/{nowhere}\n"

    answer = pod.run("activate", stdin=document)

    assert (answer.status, answer.lines) == (
        1,
        [f"sha256:{nowhere}, which the unit names, is not on this pod: it must be placed first"],
    )
    assert systemd.calls == []


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("engine", "../x", "\"../x\" is not a usable engine: letters, digits, '.', '_' and '-' only"),
        ("unit.name", "ssh.service", f"the unit of engine {ENGINE} must be named {UNIT}"),
        ("unit.text", 1, "the document's unit.text must be text"),
        ("ready.url", "https://x", "the document's ready.url must begin with http://"),
        ("ready.timeoutSeconds", "long", "the document's ready.timeoutSeconds must be a number"),
        ("ready.timeoutSeconds", True, "the document's ready.timeoutSeconds must be a number"),
        ("ready.models", ["m1"], "the document's ready.models must be an object"),
        ("port", "8000", "the document's port must be a whole number"),
        ("secretsRevision", "1", "the document's secretsRevision must be a whole number"),
        ("stack", None, "the document's stack is missing: it must be text"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(
    path: str, value: object, sentence: str, engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    document = engine.document()
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value

    assert pod.run("activate", stdin=document) == (1, {}, [sentence])
    assert (systemd.calls, list(pod.units.iterdir())) == ([], [])


def test_progress_says_what_it_waits_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_SECONDS", 0.0)

    prefix = "(EngineCore pid=123) INFO 11-30 13:13:31 [weight_utils.py:123] "
    answer = engine.activate(polls=2, says=[prefix + "Loading weights " + "x" * 300])

    last = ("Loading weights " + "x" * 300)[:160]
    assert answer.status == 0
    assert answer.lines[0] == (
        f"{last} (waiting for {UNIT}: 0 of 20 s, active (running), nothing answers at http://127.0.0.1:{engine.port})"
    )


def test_an_engine_is_looked_at_oftener_while_it_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.5)
    assert [waiting.poll_of(waited) for waited in (0, 1, 4, 60)] == [0.02, 0.05, 0.2, 0.5]


def test_a_long_start_fills_no_log() -> None:
    """Where nobody watches a terminal, each line is kept: of an hour of waiting there are 69."""
    said = [waiting.SAY_SECONDS]
    while said[-1] < 3600:
        said.append(said[-1] + waiting.pause_of(said[-1]))
    assert said[:6] == [10, 20, 30, 40, 50, 62.5]
    assert len(said) == 69


def test_no_secret_comes_out_of_a_failure(engine: Engine, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_SECONDS", 0.0)
    awkward = "canary\"q\\uote'é"
    set_secrets(pod, HF_TOKEN="hf_older_canary")
    engine.activate()
    set_secrets(pod, HF_TOKEN="hf_canary", VLLM_API_KEY=awkward, OTHER="canary spaced ")

    lines = engine.fails(
        timeout=0.1,
        hang=True,
        polls=10**9,
        says=[
            f"args: api_key={awkward} token=hf_canary old=hf_older_canary",
            f"json: {json.dumps(awkward)}, repr: {awkward!r}",
            "at the end: canary spaced ",
            "ERROR ValueError: token " + "x" * 285 + "hf_canary is bad",
        ],
    )

    text = "\n".join(lines)
    assert "canary" not in text
    assert "args: api_key=[secret] token=[secret] old=[secret]" in text
    assert 'json: "[secret]", repr: ' in text
    assert any("(waiting for" in line for line in lines)


def test_an_engine_keeps_only_itself_waiting(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    """While one engine loads, the store is free: another base of the stack is prepared, placed, even activated."""
    results: list[int] = []

    def meanwhile(unit: FakeUnit) -> None:
        results.append(pod.run("gc").status)
        assert (pod.root / f".lock-{ENGINE}").exists()

    systemd.on_look = [lambda unit: None] * 5 + [meanwhile]

    assert engine.activate(polls=10).status == 0
    assert results == [0]


@pytest.mark.parametrize("killed_at", ["loading", "its answer"])
def test_an_engine_that_pulumi_does_not_know_goes_with_its_secrets(
    killed_at: str, engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulumi was interrupted in the first `up` and knows of the secrets only: `destroy` undoes no more than those.

    podctl may have gone on without Pulumi, so it does not matter whether the engine is proven.
    """
    set_secrets(pod, VLLM_API_KEY="sk")

    def killed(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if killed_at == "loading":
            patch.setattr(proof, "await_ready", killed)
            with pytest.raises(KeyboardInterrupt):
                engine.activate()
        else:
            engine.activate()
    assert generations(pod) == {1: killed_at == "its answer"}
    assert (pod.units / UNIT).exists()
    pod.run("unplace", "--stack", "prod", "--base", "org/base")

    assert pod.run("unsecret", "--engine", ENGINE).result == {"removed": True}

    assert systemd.units[UNIT].active == "inactive"
    assert list(pod.units.iterdir()) == []
    assert not (pod.root / "units" / ENGINE).exists()
    assert not (pod.root / "secrets").exists()
    assert pod.blobs() == set()
    assert pod.run("remove").result == {"removed": True, "left": []}


def test_going_back_brings_the_old_secrets_back(engine: Engine, pod: PodDirectory) -> None:
    """A new token that does not work must not leave the pod with nothing that serves."""
    good = set_secrets(pod, VLLM_API_KEY="sk-good")
    engine.activate(key="sk-good", revision=good)
    in_force = secrets_in_force(pod).read_bytes()
    bad = set_secrets(pod, VLLM_API_KEY="sk-bad")
    assert secrets_in_force(pod).read_bytes() == in_force, "what serves must not see them before the trial"

    lines = engine.fails(revision=bad, die=["OSError: 401 for the token sk-bad"])

    assert lines[1] == (
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: 401 for the token [secret]; "
        "the unit from before serves again (m1, org/base)"
    )
    assert secrets_in_force(pod).read_bytes() == in_force
    assert mode(secrets_in_force(pod)) == "0o600"
    assert kept_revisions(pod) == {good, bad}
    assert engine.activate(key="sk-good", revision=good).result == activated(1, restarted=False)


def test_a_revision_is_kept_as_long_as_one_may_go_back_to_it(engine: Engine, pod: PodDirectory) -> None:
    revisions = []
    for n in range(5):
        revisions.append(set_secrets(pod, HF_TOKEN=str(n)))
        assert engine.activate(revision=revisions[-1]).status == 0
        assert f'HF_TOKEN="{n}"' in secrets_in_force(pod).read_text()
    assert kept_revisions(pod) == set(revisions[-3:])

    coming = set_secrets(pod, HF_TOKEN="coming")
    assert engine.activate("m1", "m2", revision=revisions[-1]).status == 0
    assert kept_revisions(pod) == {*revisions[-2:], coming}


def test_without_a_revision_the_newest_secrets_are_meant(engine: Engine, pod: PodDirectory) -> None:
    assert engine.activate().status == 0
    assert secrets_in_force(pod).read_text() == "# revision 0\n", "the unit wants a file, if an empty one"
    assert (mode(secrets_in_force(pod)), mode(pod.root / "secrets")) == ("0o600", "0o700")

    newest = set_secrets(pod, HF_TOKEN="hf")

    assert engine.activate().result == activated(2, restarted=True)
    assert secrets_in_force(pod).read_text() == f'# revision {newest}\nHF_TOKEN="hf"\n'
    assert engine.activate(revision=newest).result == activated(2, restarted=False)


def test_secrets_that_are_not_here_are_refused(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate()
    systemd.calls.clear()
    before = pod.snapshot()

    answer = engine.activate(revision=7)

    assert (answer.status, answer.lines) == (
        1,
        [f"revision 7 of the secrets of engine {ENGINE} is not on this pod: they must be set first"],
    )
    assert (pod.snapshot(), systemd.calls) == (before, [])


def test_nothing_comes_back_without_its_secrets(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    """An engine that lost its API key would serve whoever asks."""
    engine.activate(revision=set_secrets(pod, VLLM_API_KEY="sk"), key="sk")
    lost = next((pod.root / "secrets").glob(f"{ENGINE}.*.env"))
    bad = set_secrets(pod, VLLM_API_KEY="sk2")
    lost.unlink()

    lines = engine.fails(revision=bad, die=["OSError: no model"])

    assert lines[1] == (
        f"{UNIT} did not become ready: the engine ended (oom-kill): OSError: no model; the unit from before did not "
        f"come back either: revision {lost.name.split('.')[1]} of the secrets of engine {ENGINE} is not on this pod: "
        "they must be set first"
    )
    assert systemd.units[UNIT].starts == 2


def test_systemd_alone_decides_how_long_a_stop_takes(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TimeoutStopSec= is as long as the stack file's shutdown timeout, up to a day."""
    limits = {}

    def run(*argv: str, seconds: float | None = 300.0) -> Ran:
        limits[" ".join(argv[2:])] = seconds
        return systemd.run(*argv)

    monkeypatch.setattr(programs, "run", run)
    engine.activate(engine=OTHER)
    engine.fails(die=[])
    pod.run("deactivate", "--engine", ENGINE)

    unlimited = {call for call, seconds in limits.items() if seconds is None}
    assert unlimited == {
        f"restart {UNIT}",
        f"restart {OTHER_UNIT}",
        f"disable --now {UNIT}",
        f"disable --now {OTHER_UNIT}",
        f"enable --now {OTHER_UNIT}",
    }


def test_a_program_without_a_limit_runs_to_its_end(real_run: Callable[..., Ran]) -> None:
    assert real_run("sh", "-c", "echo done", seconds=None) == Ran(0, "done\n", "")
    assert real_run("sleep", "5", seconds=0.01) == Ran(124, "", "sleep 5 did not end within 0 seconds")


def test_an_activation_waits_longer_for_another_than_an_engine_may_load_and_be_probed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {}
    hold = files.hold

    def held(path: str, purpose: str, seconds: float = files.LOCK_SECONDS) -> AbstractContextManager[None]:
        waits[Path(path).name] = seconds
        return hold(path, purpose, seconds)

    monkeypatch.setattr(files, "hold", held)
    document = engine.document()
    document["ready"]["timeoutSeconds"] = 3600

    assert engine.pod.run("activate", stdin=document).status == 0
    assert waits == {f".lock-{ENGINE}": 11100, ".lock": files.LOCK_SECONDS}


def test_deactivate_takes_everything_of_the_engine(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    homes = pod.root.parent
    (homes / "private" / f"lora-pods-{ENGINE}" / "huggingface").mkdir(parents=True)
    (homes / f"lora-pods-{ENGINE}").symlink_to(f"private/lora-pods-{ENGINE}")
    engine.activate()
    pod.run("unplace", "--stack", "prod", "--base", "org/base")
    systemd.calls.clear()

    answer = pod.run("deactivate", "--engine", ENGINE)

    assert answer == (0, {"engine": ENGINE, "removed": True, "collected": [engine.digest]}, [])
    assert systemd.calls == TAKEN_AWAY
    assert (list(pod.units.iterdir()), pod.blobs()) == ([], set())
    assert not (pod.root / "units" / ENGINE).exists()
    assert list((homes / "private").iterdir()) == []
    assert not (homes / f"lora-pods-{ENGINE}").is_symlink()
    assert pod.run("deactivate", "--engine", ENGINE).result == {"engine": ENGINE, "removed": False, "collected": []}
    assert pod.run("remove").result == {"removed": True, "left": []}


def test_deactivate_leaves_a_directory_that_systemd_did_not_make(engine: Engine, pod: PodDirectory) -> None:
    mine = pod.root.parent / f"lora-pods-{ENGINE}"
    mine.mkdir()
    engine.activate()

    pod.run("deactivate", "--engine", ENGINE)

    assert mine.is_dir()


def test_an_engine_that_does_not_stop_is_not_forgotten(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate()
    stop, systemd._stop = systemd._stop, lambda unit: None  # type: ignore[method-assign]

    answer = pod.run("deactivate", "--engine", ENGINE)

    systemd._stop = stop  # type: ignore[method-assign]
    assert (answer.status, answer.lines) == (1, [f"{UNIT} does not stop: it is active (running)"])
    assert (pod.units / UNIT).exists()
    assert generations(pod) == {1: True}


def test_a_trial_that_nobody_waits_for_any_more_is_over(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulumi does not record an activation whose end it did not see: what it knows is what served before."""
    engine.activate("m1")
    good = (pod.units / UNIT).read_text()
    monkeypatch.setattr(waiting, "deserted", lambda: True)

    answer = engine.activate("m1", "m2")

    assert answer.status == 1
    said = "\n".join(answer.lines)
    assert "the run that wanted it was interrupted" in said
    assert "the unit from before serves again" in said
    assert (pod.units / UNIT).read_text() == good
    assert generations(pod) == {1: True}


def test_nor_is_one_kept_that_nobody_waits_for_once_it_is_proven(
    engine: Engine, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")
    good = (pod.units / UNIT).read_text()
    gone: list[str] = []

    def proven(*_: object) -> tuple[str, bool, dict[str, Any]]:
        gone.append("whoever wanted it")
        return "", False, {}

    monkeypatch.setattr(probe, "prove", proven)
    monkeypatch.setattr(waiting, "deserted", lambda: bool(gone))

    answer = engine.activate("m1", "m2")

    assert (answer.status, answer.lines[-1]) == (
        1,
        f"{UNIT} is not kept: the run that wanted it was interrupted; the unit from before serves again (m1, org/base)",
    )
    assert (pod.units / UNIT).read_text() == good
    assert generations(pod) == {1: True}


def test_sshd_that_closed_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    stderr = os.dup(2)
    try:
        os.dup2(ours.fileno(), 2)
        assert not waiting.deserted()
        theirs.close()
        assert waiting.deserted()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        ours.close()


def test_leave_takes_an_engine_and_what_was_placed_for_it(pod: PodDirectory, systemd: FakeSystemd, port: int) -> None:
    key = names.engine_of("prod", "org/base")
    engine = Engine(pod, port)
    pod.run("secrets", stdin={"engine": key, "secrets": {"VLLM_API_KEY": "k"}})
    assert pod.run("activate", stdin=engine.document(engine=key, key="k")).status == 0
    pod.stage(bundle(b"other"))
    pod.place({"m": digest_of(bundle(b"other"))}, stack="prod-org")

    answer = pod.run("leave", "--engine", key)

    assert answer.result == {"removed": False, "left": ["model m of stack prod-org"]}
    assert pod.blobs() == {digest_of(bundle(b"other"))}
    assert not (pod.root / "secrets").exists()
    assert list(pod.units.iterdir()) == []
    assert systemd.units[names.unit_name(key)].active == "inactive"

    assert pod.run("leave", "--engine", names.engine_of("prod-org", "org/base")).result["removed"] is True
    assert not pod.root.exists()
    assert pod.run("leave", "--engine", key) == (0, {"removed": True, "left": []}, [])
