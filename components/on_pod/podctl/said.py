"""What podctl says: plain sentences, fit to be shown."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import List, Sequence, TypeVar

T = TypeVar("T")

FEW_NAMES = 100
NAMED = 20  # adapters in one sentence


class Refusal(Exception):
    """A plain sentence for the operator: what, where, what to do. `details` are lines shown below it."""

    def __init__(self, sentence: str, details: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.details = tuple(details)


def clean(text: str) -> str:
    """`text` with everything that could steer a terminal (controls, bidi marks, line breaks) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(line: str, limit: int = 480) -> None:
    """One line on stderr. A reader that went away is no reason to leave a job half done."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(clean(line)[:limit] + "\n")
        sys.stderr.flush()


def human(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return "%d %s" % (size, unit) if unit == "bytes" else "%.1f %s" % (size, unit)
        size /= 1024
    return "%.1f GiB" % size


def few(names: Sequence[str]) -> List[str]:
    """A list for a result that Pulumi's command plugin reads: it can hang on a line over 64 KiB."""
    more = len(names) - FEW_NAMES
    return [*names[:FEW_NAMES], *(["and %d more" % more] if more > 0 else [])]


def shown(value: object) -> str:
    return clean(json.dumps(value, ensure_ascii=False, default=str))[:120]


AGAIN = "run pulumi up again"
GO_ON = AGAIN + ", it goes on from there"


def named(models: Sequence[str]) -> str:
    more = len(models) - NAMED
    return ", ".join(models[:NAMED]) + (" and %d more" % more if more > 0 else "")


def one_or_more(count: int, one: T, more: T) -> T:
    return one if count == 1 else more
