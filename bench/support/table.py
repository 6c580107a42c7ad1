"""What was measured, as a table that says for itself what is compared and whether it is good enough."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEAD = ("what", "here", "against", "there", "here ÷ there", "to reach", "")


@dataclass(frozen=True)
class Figure:
    """Values of several runs, of which the median counts."""

    values: Sequence[float]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        text = f"{shown(self.median)} {self.unit}".strip()
        if len(self.values) == 1:
            return text
        return f"{text} ({shown(min(self.values))}–{shown(max(self.values))})"

    def __sub__(self, other: Figure) -> Figure:
        """Without the median of the other."""
        return Figure([value - other.median for value in self.values], self.unit)


@dataclass(frozen=True)
class Goal:
    """What is good enough: of the ratio, of the figure itself (`alone`), or of how much larger it is (`more`)."""

    at_most: float | None = None
    at_least: float | None = None
    of: str = "ratio"

    def reached(self, here: Figure, there: Figure | None) -> bool:
        value = here.median
        if there is not None and self.of == "ratio":
            value /= there.median
        if there is not None and self.of == "more":
            value -= there.median
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def shown(self, unit: str) -> str:
        word, bound = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        assert bound is not None
        if self.of == "ratio":
            return f"{word} {bound:g}"
        return f"{word} {'+' if self.of == 'more' else ''}{bound:g} {unit}".strip()


@dataclass(frozen=True)
class Row:
    """One comparison; without `there` the figure stands alone, without a `goal` it is only reported."""

    what: str
    here: Figure
    against: str = ""
    there: Figure | None = None
    goal: Goal | None = None

    @property
    def reached(self) -> bool | None:
        return self.goal.reached(self.here, self.there) if self.goal else None

    def cells(self) -> tuple[str, ...]:
        ratio = f"{self.here.median / self.there.median:.2f}" if self.there and self.there.median else ""
        return (
            self.what,
            str(self.here),
            self.against,
            str(self.there) if self.there else "",
            ratio,
            self.goal.shown(self.here.unit) if self.goal else "",
            {True: "reached", False: "NOT reached", None: ""}[self.reached],
        )


@dataclass
class Table:
    """`compared` says in a sentence or two what stands against what; `versions` are those of the programs compared."""

    title: str
    compared: str
    rows: list[Row] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)

    def add(self, *row: Row) -> None:
        self.rows += row

    def markdown(self, machine: str, command: str) -> str:
        versions = "".join(f", {name} {version}" for name, version in self.versions.items())
        lines = [
            *(f"## {self.title}", "", self.compared, ""),
            *(line(HEAD), line(["---"] * len(HEAD)), *(line(row.cells()) for row in self.rows)),
            *("", f"{machine}{versions}. `{command}`. Medians (least–most)."),
        ]
        return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: float) -> str:
    """Three digits that mean something."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
