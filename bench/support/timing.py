"""Seconds of something, several times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from bench.support.table import Figure


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turn(repeat: int, *works: Callable[[], object]) -> list[Figure]:
    """Each once without counting, then all in turn, so that a machine whose speed drifts is the same to all."""
    for work in works:
        work()
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeat):
        for place, work in enumerate(works):
            seconds[place].append(timed(work))
    return [Figure(values, "s") for values in seconds]


def tell(what: str) -> None:
    """Where a long measurement has come to."""
    sys.stderr.write(f"  {what}\n")
    sys.stderr.flush()
