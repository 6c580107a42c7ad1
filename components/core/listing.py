"""How several things are told in one line that stays short: their number, names, and places in the stack file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from components.core.errors import printable

SHOWN = 5

_ITEM = re.compile(r"(.*)\[(\d+)\]")


def counted(count: int, noun: str) -> str:
    """`1 adapter`, `2 adapters`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[object], shown: int = SHOWN) -> str:
    """The first of them and how many more: short however many there are."""
    text = ", ".join(str(item) for item in items[:shown])
    return text if len(items) <= shown else f"{text} and {len(items) - shown} more"


def listed_names(names: Sequence[str], shown: int, limit: int) -> str:
    """The same of names from outside, each of at most `limit` characters; only those shown are looked at."""
    text = ", ".join(printable(name, limit) for name in names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"


def shared_place(places: Iterable[str]) -> str:
    """One path for several items of a list: `models[0], models[2]` is `models[0, 2]`."""
    found = [match for place in places if (match := _ITEM.fullmatch(place))]
    numbers = sorted(int(match[2]) for match in found)
    return f"{found[0][1]}[{listed(numbers)}]" if found else ""


def item_number(place: str) -> int:
    """2 for `models[2]`; 0 for what is no item of a list."""
    match = _ITEM.fullmatch(place)
    return int(match[2]) if match else 0
