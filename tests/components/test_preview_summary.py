"""What a preview says of each pod, word for word."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pulumi
import pytest

from components.core.lora_flags import PlannedFlag
from components.deployment import tell
from components.preview import Foreseen, cut, summary
from components.running import last_outputs
from tests.components.graph import Recorder

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
RANK = PlannedFlag("max-lora-rank", "8", "largest rank is 8 (acme-v1)")
RANK_LINE = "  --max-lora-rank 8: largest rank is 8 (acme-v1)"
RESTARTS = "  the engine restarts: "


def pod(**other: Any) -> Foreseen:
    """A pod whose engine is as `engine()` says, and of whose commands only the activation runs."""
    same: dict[str, Any] = {
        "base": "org/base",
        "models": {"acme-v1": A, "acme-v2": B},
        "flags": (RANK,),
        "unit_sha256": "planned",
        "reached": True,
        "prepared": True,
        "activated": False,
        "secrets_revision": 7,
    }
    return Foreseen(**{**same, **other})


def engine(**other: Any) -> dict[str, Any]:
    """What is recorded of an engine that runs as `pod()` plans it."""
    # Pulumi hands a program's own numbers back to it as floats.
    same = {
        "models": {"org/base": None, "acme-v1": A, "acme-v2": B},
        "flags": {"max-lora-rank": "8"},
        "unitSha256": "planned",
        "secretsRevision": 7.0,
    }
    return {**same, **other}


def said(old: Mapping[str, Any], planned: Foreseen) -> list[str]:
    return summary({"org/base": old}, [planned])


def test_a_first_start() -> None:
    assert summary({}, [pod(secrets_revision=None, reached=False, prepared=False)]) == [
        "org/base: 2 adapters, 2 added",
        "  + acme-v1 aaaaaaaaaaaa",
        "  + acme-v2 bbbbbbbbbbbb",
        RANK_LINE,
        "  the engine starts for the first time",
    ]


def test_a_first_start_without_adapters() -> None:
    assert summary({}, [pod(models={}, flags=())]) == [
        "org/base: no adapters",
        "  the engine starts for the first time",
    ]


def test_nothing_to_do() -> None:
    assert said(engine(), pod(activated=True)) == ["org/base: 2 adapters, nothing changes"]
    assert said(engine(), pod(activated=True, models={"acme-v1": A})) == ["org/base: 1 adapter, nothing changes"]


def test_what_is_recorded_is_older_than_what_runs() -> None:
    """Another pod's failure kept this one's success from being recorded; Pulumi knows that there is nothing to do."""
    assert said(engine(models={"acme-v1": C}), pod(activated=True)) == ["org/base: 2 adapters, nothing changes"]


def test_changed_added_and_removed() -> None:
    rank = PlannedFlag("max-lora-rank", "64", "largest rank is 64 (acme-v3)")
    loras = PlannedFlag("max-loras", "2", "2 adapters, all may share a batch")
    planned = pod(models={"acme-v1": C, "acme-v3": B}, flags=(loras, rank), unit_sha256="other")
    assert said(engine(), planned) == [
        "org/base: 2 adapters, 1 changed, 1 added, 1 removed",
        "  ~ acme-v1 aaaaaaaaaaaa → cccccccccccc",
        "  + acme-v3 bbbbbbbbbbbb",
        "  - acme-v2 bbbbbbbbbbbb",
        "  --max-loras 2 (was not given): 2 adapters, all may share a batch",
        "  --max-lora-rank 64 (was 8): largest rank is 64 (acme-v3)",
        RESTARTS + "adapters, flags changed",
    ]


def test_the_last_adapter_goes() -> None:
    assert said(engine(models={"acme-v1": A}), pod(models={}, flags=(), unit_sha256="other")) == [
        "org/base: no adapters, 1 removed",
        "  - acme-v1 aaaaaaaaaaaa",
        "  --max-lora-rank (was 8): no longer given, as there is no adapter",
        RESTARTS + "adapters, flags changed",
    ]


@pytest.mark.parametrize(
    ("planned", "old", "cause"),
    [
        (pod(unit_sha256="other"), engine(), "unit"),
        (pod(secrets_revision=8), engine(), "secrets"),
        (pod(secrets_revision=None), engine(), "secrets"),
        (pod(unit_sha256="other", secrets_revision=None), engine(), "unit, secrets"),
        (pod(unit_sha256="other", secrets_revision=None, prepared=False), engine(), "unit"),
    ],
)
def test_why_an_engine_restarts_with_the_same_adapters(planned: Foreseen, old: dict[str, Any], cause: str) -> None:
    assert said(old, planned) == ["org/base: 2 adapters, none changes", RANK_LINE, RESTARTS + cause + " changed"]


@pytest.mark.parametrize(
    ("planned", "unless"),
    [
        (pod(), ""),
        (pod(secrets_revision=None, prepared=False), ", unless a secret changed"),
        (
            pod(secrets_revision=None, prepared=False, reached=False),
            ", unless the pod drifted, was emptied or is another one, or a secret changed",
        ),
    ],
)
def test_an_engine_that_is_told_what_it_runs_with(planned: Foreseen, unless: str) -> None:
    assert said(engine(), planned) == [f"org/base: 2 adapters, none changes; the engine goes on{unless}"]


def test_a_base_alone() -> None:
    planned: dict[str, Any] = {"models": {}, "flags": ()}
    assert said(engine(models={}, flags={}), pod(**planned)) == ["org/base: no adapters; the engine goes on"]
    assert said(engine(models={}, flags={}), pod(**planned, unit_sha256="other")) == [
        "org/base: no adapters",
        RESTARTS + "unit changed",
    ]


def test_a_machine_that_the_stack_file_chooses_is_described() -> None:
    planned = pod(activated=True, machine="g6e.xlarge: 1 × NVIDIA L40S, 44.7 GiB")
    assert said(engine(), planned) == ["org/base (g6e.xlarge: 1 × NVIDIA L40S, 44.7 GiB): 2 adapters, nothing changes"]


WAITS = "; what is to change there waits until it is switched on"


@pytest.mark.parametrize(
    ("old", "planned", "told"),
    [
        (engine(), {}, "switched off now, keeps what is on it"),
        (engine(models={}), {}, "switched off now, keeps what is on it" + WAITS),
        (engine(running=False), {}, "stays switched off"),
        (engine(running=False, models={}), {}, "stays switched off" + WAITS),
        (engine(running=False), {"unit_sha256": "other"}, "stays switched off" + WAITS),
        ({}, {}, "switched off; nothing is put on it before it is switched on"),
    ],
)
def test_a_pod_that_is_to_be_off(old: dict[str, Any], planned: dict[str, Any], told: str) -> None:
    """In one line, whatever is to change there: none of it happens now."""
    assert said(old, pod(switched_off=True, secrets_revision=None, **planned)) == [f"org/base: 2 adapters, {told}"]


def test_a_pod_that_is_to_be_off_where_nobody_can_tell_what_runs() -> None:
    assert summary(None, [pod(switched_off=True)]) == ["org/base: 2 adapters, switched off"]


def test_a_pod_that_is_switched_on_again() -> None:
    again: dict[str, Any] = {"reached": False, "prepared": False, "secrets_revision": None}
    head = "org/base: 2 adapters, switched on again"
    assert said(engine(running=False), pod(**again)) == [f"{head}, none changes; the engine starts as it was"]
    assert said(engine(running=False, models={"acme-v1": C, "acme-v2": B}), pod(**again, unit_sha256="other")) == [
        f"{head}, 1 changed",
        "  ~ acme-v1 cccccccccccc → aaaaaaaaaaaa",
        RANK_LINE,
        RESTARTS + "adapters changed",
    ]


def test_a_hundred_changes_are_cut() -> None:
    names = [f"acme-v{n:03}" for n in range(100)]
    lines = said(engine(models=dict.fromkeys(names, A)), pod(models=dict.fromkeys(names, B), unit_sha256="other"))
    assert lines[:2] == ["org/base: 100 adapters, 100 changed", "  ~ acme-v000 aaaaaaaaaaaa → bbbbbbbbbbbb"]
    assert lines[12:] == [
        "  ~ acme-v011 aaaaaaaaaaaa → bbbbbbbbbbbb",
        "  and 88 more",
        RANK_LINE,
        RESTARTS + "adapters changed",
    ]


def test_pods_come_and_go() -> None:
    lines = summary({"org/base": engine(), "org/gone": engine()}, [pod(activated=True), pod(base="org/new")])
    assert lines[0] == "org/base: 2 adapters, nothing changes"
    assert lines[1] == "org/new: 2 adapters, 2 added"
    assert lines[-1] == "org/gone: no longer in the stack file; its engine and what it serves are removed"


def test_nobody_can_tell_what_runs() -> None:
    assert summary(None, [pod(), pod(base="org/same", activated=True)]) == [
        "org/base: 2 adapters; what it serves now is not known here, so what changes cannot be told",
        RANK_LINE,
        "org/same: 2 adapters, nothing changes",
    ]


def test_the_state_is_a_file_that_anybody_may_have_written_to() -> None:
    mangled = {"models": {"a\n\x1b[31mb": 7}, "flags": "none", "unitSha256": None}
    lines = said(mangled, pod())
    assert lines[3] == r"  - a\n\x1b[31mb 7"
    assert all(line.isprintable() for line in lines)
    assert summary({"org/base": "what?"}, [pod()])[-1] == "  the engine starts for the first time"


def test_cut() -> None:
    assert cut(["a", "b"], 2) == ["a", "b"]
    assert cut(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]


@pytest.mark.parametrize(
    ("answer", "engines"),
    [
        ({"outputs": {"engines": {"org/base": {"unit": "u"}}}}, {"org/base": {"unit": "u"}}),
        ({"outputs": {}}, {}),
        ({"outputs": None}, {}),
        ({"outputs": {"engines": "what?"}}, {}),
        (Exception("unknown stack"), None),
    ],
)
def test_the_last_outputs(monkeypatch: pytest.MonkeyPatch, answer: Any, engines: Any) -> None:
    asked = []

    async def invoke(token: str, arguments: Mapping[str, Any]) -> Any:
        asked.append((token, arguments))
        if isinstance(answer, Exception):
            raise answer
        return answer

    pulumi.runtime.set_mocks(Recorder(), project="lora-pods", stack="acme", organization="organization")
    monkeypatch.setattr(pulumi.runtime, "invoke_async", invoke)
    # Not asyncio.run: it leaves the thread without the loop that Pulumi's mocks use in other tests.
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(last_outputs()) == engines
    loop.close()
    assert asked == [("pulumi:pulumi:readStackOutputs", {"name": "organization/lora-pods/acme"})]


def test_many_warnings_are_one_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has a line in the list of resources as well, so a hundred would be two hundred lines."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(pulumi.log, "info", lambda text: told.append(("info", text)))
    monkeypatch.setattr(pulumi.log, "warn", lambda text: told.append(("warn", text)))
    described = SimpleNamespace(notes=("a note",), warnings=tuple(f"warning {n}" for n in range(100)))
    tell(cast(Any, described))
    warnings = "\nwarning: ".join([*(f"warning {n}" for n in range(12)), "and 88 more"])
    assert told == [("info", "a note"), ("warn", warnings)]
