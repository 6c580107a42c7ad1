"""What a preview says of each pod: which adapters change, what was computed and why, whether the engine restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.core.errors import printable
from components.core.listing import counted
from components.core.lock import short_digest
from components.core.lora_flags import PlannedFlag

SHOWN_CHANGES = 12
"""How many adapters are named of those that change, and how many warnings are told in full."""


@dataclass(frozen=True)
class Foreseen:
    """One pod as it is to be, and what a preview can tell of the commands that lead there.

    `reached`, `prepared` and `activated` say that the command of that name will not run: all it is told is as it was.
    `secrets_revision` is that of the secrets on the pod; None where this run tells the pod its secrets (again).
    """

    base: str
    models: Mapping[str, str]
    """The digest of each model with an adapter."""
    flags: Sequence[PlannedFlag]
    unit_sha256: str
    reached: bool
    prepared: bool
    activated: bool
    secrets_revision: int | None
    machine: str = ""
    """What the machine is, where the stack file chooses it and not only names it."""
    switched_off: bool = False
    """Whether it is to be off: then no command runs, and nothing on it changes."""


def summary(running: Mapping[str, Any] | None, pods: Sequence[Foreseen]) -> list[str]:
    """The lines for all pods, one by one.

    `running` is what `components.running` recorded of each base's engine; None where nobody can tell.
    """
    lines = [line for pod in pods for line in _pod(None if running is None else _mapping(running, pod.base), pod)]
    for base in sorted(set(running or {}) - {pod.base for pod in pods}):
        lines.append(f"{printable(base)}: no longer in the stack file; its engine and what it serves are removed")
    return lines


def cut(lines: Sequence[str], shown: int = SHOWN_CHANGES) -> list[str]:
    """At most `shown` lines, and then how many more there are."""
    return [*lines[:shown], f"and {len(lines) - shown} more"] if len(lines) > shown else list(lines)


def is_off(recorded: Mapping[str, Any]) -> bool:
    """Whether an engine's record says that its pod is switched off."""
    return recorded.get("running") is False


def _pod(old: Mapping[str, Any] | None, pod: Foreseen) -> Iterator[str]:
    head = f"{_named(pod)}: {_counted(len(pod.models))}"
    if pod.switched_off:
        yield f"{head}, {_switched_off(old, pod)}"
        return
    if pod.activated:
        yield f"{head}, nothing changes"
        return
    if old is None:
        yield f"{head}; what it serves now is not known here, so what changes cannot be told"
        yield from _flags(pod.flags, None)
        return
    changes, causes = _changes(old, pod), _causes(old, pod)
    starts = is_off(old)
    by_kind = [f"{len(lines)} {kind}" for kind, lines in changes.items()] or ["none changes"] * bool(pod.models)
    head = ", ".join([head, *["switched on again"] * starts, *by_kind])
    if not causes and starts:
        yield f"{head}; the engine starts as it was"
        return
    if not causes:
        yield f"{head}; the engine goes on{_unless(pod)}"
        return
    yield head
    yield from (f"  {line}" for line in cut([line for kind in changes.values() for line in kind]))
    yield from _flags(pod.flags, _mapping(old, "flags") if old else None)
    yield f"  the engine restarts: {', '.join(causes)} changed" if old else "  the engine starts for the first time"


def _switched_off(old: Mapping[str, Any] | None, pod: Foreseen) -> str:
    """What is said of a pod that is to be off: whether it was before, and that what changes has to wait."""
    if old is None:
        return "switched off"
    if not old:
        return "switched off; nothing is put on it before it is switched on"
    now = "stays switched off" if is_off(old) else "switched off now, keeps what is on it"
    waits = bool(_planned_otherwise(old, pod))
    return f"{now}; what is to change there waits until it is switched on" if waits else now


def _changes(old: Mapping[str, Any], pod: Foreseen) -> dict[str, list[str]]:
    """A line per model whose adapter changes, by what happens to it."""
    before = _adapters_of(old)
    both = sorted(before.keys() & pod.models.keys())
    found = {
        "changed": [
            f"~ {printable(model)} {_short(before[model])} → {_short(pod.models[model])}"
            for model in both
            if before[model] != pod.models[model]
        ],
        "added": [f"+ {printable(model)} {_short(pod.models[model])}" for model in sorted(pod.models.keys() - before)],
        "removed": [f"- {printable(model)} {_short(before[model])}" for model in sorted(before.keys() - pod.models)],
    }
    return {kind: lines for kind, lines in found.items() if lines}


def _causes(old: Mapping[str, Any], pod: Foreseen) -> list[str]:
    """Why an engine that runs is restarted: what `activate` compares, its unit's text and the secrets' revision."""
    if not old:
        return ["first start"]
    causes = _planned_otherwise(old, pod)
    # Everything else that the secrets' command is told is told to `prepare` as well.
    told_anew = pod.secrets_revision is None and pod.prepared
    if told_anew or pod.secrets_revision not in (None, old.get("secretsRevision")):
        causes.append("secrets")
    return causes


def _planned_otherwise(old: Mapping[str, Any], pod: Foreseen) -> list[str]:
    """What of a pod's plan is not as it was, as far as the plan alone tells."""
    causes = []
    if _adapters_of(old) != pod.models:
        causes.append("adapters")
    if _mapping(old, "flags") != {flag.name: flag.value for flag in pod.flags}:
        causes.append("flags")
    if not causes and old.get("unitSha256") != pod.unit_sha256:
        causes.append("unit")
    return causes


def _unless(pod: Foreseen) -> str:
    """What of a pod that is told everything again may turn out to be new."""
    if not pod.reached:
        return ", unless the pod drifted, was emptied or is another one, or a secret changed"
    return ", unless a secret changed" if pod.secrets_revision is None else ""


def _flags(flags: Sequence[PlannedFlag], before: Mapping[str, Any] | None) -> Iterator[str]:
    """A line per computed flag, with its old value where that was another; `before` is None where there was none."""
    for flag in flags:
        old = None if before is None else before.get(flag.name, "not given")
        was = f" (was {printable(old)})" if old not in (None, flag.value) else ""
        yield f"  --{flag.name} {flag.value}{was}: {printable(flag.reason)}"
    for name in sorted((before or {}).keys() - {flag.name for flag in flags}):
        yield f"  --{printable(name)} (was {printable((before or {})[name])}): no longer given, as there is no adapter"


def _named(pod: Foreseen) -> str:
    return f"{printable(pod.base)} ({printable(pod.machine)})" if pod.machine else printable(pod.base)


def _counted(count: int) -> str:
    return counted(count, "adapter") if count else "no adapters"


def _adapters_of(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The digest of each model that is recorded with one: the base and its other names have none."""
    return {model: digest for model, digest in _mapping(recorded, "models").items() if digest is not None}


def _short(digest: object) -> str:
    return printable(short_digest(str(digest)))


def _mapping(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under a key. State is a file that a person may have written to: something else counts as nothing."""
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}
