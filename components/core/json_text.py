"""JSON from outside: no key twice, and never more than a sentence about what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

from components.core.errors import printable

LFS_POINTER = b"version https://git-lfs"


class NotReadableError(Exception):
    """`str(error)` is a clause: what is wrong with the text."""


class DuplicateKeyError(NotReadableError):
    """One object has a key twice: whoever reads it may take either."""


def parse_json(
    raw: bytes,
    parse_constant: Callable[[str], object] | None = None,
    parse_int: Callable[[str], object] | None = None,
) -> object:
    """The document, with `NaN`, `Infinity` and whole numbers as Python reads them unless told otherwise.

    Raises:
        NotReadableError: it is no UTF-8, no JSON, nested too deeply, or holds a key twice.
    """
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=parse_constant, parse_int=parse_int
        )
    except UnicodeDecodeError:
        raise NotReadableError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise NotReadableError(f"not JSON ({error.msg}, line {error.lineno})") from None
    # Nested too deeply, or a number of thousands of digits.
    except (ValueError, RecursionError):
        raise NotReadableError("not JSON that can be read") from None


def no_constants(name: str) -> NoReturn:
    """For `parse_constant`, where `NaN` and `Infinity` are no JSON."""
    raise ValueError(name)


def no_negative_zero(text: str) -> int:
    """For `parse_int`, where `-0` is no whole number, as for Rust's serde."""
    if text == "-0":
        raise ValueError(text)
    return int(text)


def as_object(value: object) -> dict[str, object] | None:
    """`value` if it is a JSON object; its keys are strings because JSON has no others."""
    return value if isinstance(value, dict) else None


def shown_json(value: object) -> str:
    """A value in a message: as JSON writes it, terminal-safe and short."""
    if isinstance(value, list | dict) and value:
        value = _shortened(value)
    try:
        return printable(json.dumps(value, ensure_ascii=False), limit=60)
    except RecursionError:
        return "something nested deeply"


def _shortened(value: list[object] | dict[str, object]) -> object:
    """The first few items, since a message shows no more and a document may be a megabyte."""
    if isinstance(value, list):
        return value[:30]
    return dict(list(value.items())[:30])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f'the key "{printable(key)}" stands in it twice')
            seen.add(key)
    return result
