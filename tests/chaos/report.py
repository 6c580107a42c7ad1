"""The table of what was killed and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.schedule import FAULTS
from tests.chaos.world import Outcome

HEAD = (
    "killed",
    "where",
    "times",
    "the broken `up`",
    "`pulumi cancel`",
    "next `up` converged",
    "questions",
    "met a restart",
    "lost",
    "blobs wrong",
    "left behind",
)


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown; a row a fault, and one for all."""
    rows = [
        _row(fault, where, [each for each in outcomes if each.round.fault == fault]) for fault, where in FAULTS.items()
    ]
    rows = [row for row in rows if row[2] != "0"]
    rows.append(_row("all", "", outcomes))
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [HEAD, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _row(fault: str, where: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    ended = Counter(outcome.ended for outcome in outcomes)
    told = [fault for outcome in outcomes for fault in outcome.faults]
    return (
        fault,
        where,
        str(len(outcomes)),
        ", ".join(f"{count} {how}" for how, count in ended.most_common()),
        str(sum(outcome.cancelled for outcome in outcomes)),
        f"{sum(outcome.converged for outcome in outcomes)} of {len(outcomes)}",
        str(sum(outcome.told.asked for outcome in outcomes)),
        str(sum(outcome.told.met_restart for outcome in outcomes)),
        str(sum(len(outcome.told.lost) for outcome in outcomes)),
        str(sum("rotten" in fault for fault in told)),
        str(sum("left behind" in fault for fault in told)),
    )
