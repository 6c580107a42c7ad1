"""What is changed and what is broken, round by round: all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

STEADY = "steady"  # a model that no round changes
MOST_ADAPTERS = 4
VLLM_VERSIONS = ("0.33.0", "0.33.1")  # what the stand-in's image has wheels of; None is the one in the image

T = TypeVar("T")


@dataclass(frozen=True)
class Adapter:
    """Its bytes follow from the seed; a bad one is refused by the engine when it starts."""

    seed: int
    bad: bool = False


@dataclass(frozen=True)
class Declared:
    """What the stack file says, as far as rounds change it. The keys are numbers of keys, not the keys."""

    adapters: Mapping[str, Adapter] = field(default_factory=lambda: {STEADY: Adapter(0)})
    max_model_len: int = 512
    vllm: str | None = None
    api_key: int = 0
    ssh_key: int = 0
    probe: bool = True

    def with_adapter(self, model: str, adapter: Adapter | None) -> Declared:
        kept = {name: old for name, old in self.adapters.items() if name != model}
        return replace(self, adapters=kept if adapter is None else {**kept, model: adapter})


# A change -> the steps of its `up` that a fault can be aimed at.
CHANGES: Mapping[str, Sequence[str]] = {
    "retrained": ("upload", "place", "activate", "installed"),
    "added": ("upload", "place", "activate", "installed"),
    "removed": ("place", "activate", "installed"),
    "flag": ("activate", "installed"),
    "vLLM": ("prepare", "activate", "installed"),
    "API key": ("secrets", "activate", "installed"),
    "SSH key": ("prepare", "place", "activate"),
    "probe": ("activate",),
    "bad": ("upload", "place", "activate", "installed"),
}
RESTARTS_NOTHING = ("SSH key", "probe")

# A fault -> where it is.
FAULTS: Mapping[str, str] = {
    "pulumi and all it started": "laptop",
    "pulumi alone": "laptop",
    "one process that pulumi started": "laptop",
    "Ctrl-C": "laptop",
    "podctl": "pod",
    "the SSH sessions": "pod",
    "the pod": "pod",
    "the engine": "pod",
}
# How long after a step began, at most, the fault comes: about what the step takes.
STEP_SECONDS: Mapping[str, float] = {
    "prepare": 0.3,
    "upload": 0.3,
    "place": 0.3,
    "secrets": 0.1,
    "activate": 3.0,
    "installed": 3.0,
}


@dataclass(frozen=True)
class Round:
    """One `up` from `before` to `after`, and the fault that meets it.

    The fault comes at `moment` (a share of what such an `up` takes), or `delay` seconds after the step `aim` began.
    Where `looks`, the pod is left alone until it has settled, and looked at, before the next `up`; where `gives_up`,
    that takes back what the round changed.
    """

    number: int
    change: str
    fault: str
    before: Declared
    after: Declared
    aim: str | None
    moment: float
    delay: float
    looks: bool
    gives_up: bool

    @property
    def end(self) -> Declared:
        return self.before if self.gives_up or self.change == "bad" else self.after

    def __str__(self) -> str:
        when = f"{self.delay:.2f} s into {self.aim}" if self.aim else f"at {self.moment:.0%}"
        return f"{self.number:3}  {self.change:10}{self.fault} killed {when}{', given up' if self.gives_up else ''}"


def schedule(seed: int, rounds: int, faults: Sequence[str] = (), changes: Sequence[str] = ()) -> list[Round]:
    """Every fault and every change comes as often as every other, but for one; the moments cover a whole `up`."""
    rng = random.Random(seed)
    met, made = _dealt(rng, faults or list(FAULTS)), _dealt(rng, changes or list(CHANGES))
    moments = [(number + rng.random()) / rounds for number in range(rounds)]
    rng.shuffle(moments)
    planned: list[Round] = []
    declared = Declared(adapters={STEADY: Adapter(0), "client-1": Adapter(1), "client-2": Adapter(2)})
    for number in range(rounds):
        change, fault = next(made), next(met)
        change = _possible(change, declared)
        after = _changed(declared, change, 100 + number, rng)
        aim = rng.choice(CHANGES[change]) if rng.random() < 0.5 else None
        if fault == "one process that pulumi started" and aim == "prepare":
            aim = None  # pulumi has started nothing else by then
        planned.append(
            Round(
                number + 1,
                change,
                fault,
                declared,
                after,
                aim,
                moments[number],
                rng.random() * STEP_SECONDS[aim] if aim else 0.0,
                looks=rng.random() < 0.5,
                gives_up=rng.random() < 0.2,
            )
        )
        declared = planned[-1].end
    return planned


def first(rounds: Sequence[Round]) -> Declared:
    return rounds[0].before


def _dealt(rng: random.Random, cards: Sequence[T]) -> Iterator[T]:
    while True:
        yield from rng.sample(cards, len(cards))


def _possible(change: str, declared: Declared) -> str:
    if change == "added" and len(declared.adapters) >= MOST_ADAPTERS:
        return "removed"
    if change == "removed" and len(declared.adapters) <= 2:
        return "added"
    return change


def _changed(declared: Declared, change: str, fresh: int, rng: random.Random) -> Declared:
    """`fresh` is a number that no round had before."""
    others = sorted(set(declared.adapters) - {STEADY})
    if change == "retrained":
        return declared.with_adapter(rng.choice(others), Adapter(fresh))
    if change == "added":
        return declared.with_adapter(f"client-{fresh}", Adapter(fresh))
    if change == "removed":
        return declared.with_adapter(rng.choice(others), None)
    if change == "bad":
        return declared.with_adapter(rng.choice([*others, f"client-{fresh}"]), Adapter(fresh, bad=True))
    if change == "flag":
        return replace(declared, max_model_len=512 + fresh)
    if change == "vLLM":
        return replace(declared, vllm=rng.choice([v for v in (*VLLM_VERSIONS, None) if v != declared.vllm]))
    if change == "API key":
        return replace(declared, api_key=fresh)
    if change == "SSH key":
        return replace(declared, ssh_key=fresh)
    return replace(declared, probe=not declared.probe)
