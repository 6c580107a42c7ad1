"""A generator in a thread: the same pieces, no more of them at a time than there is room for, and the same errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from components.core.read_ahead import read_ahead


def numbers(count: int, made: list[int], at_end: BaseException | None = None) -> Iterator[int]:
    for number in range(count):
        made.append(number)
        yield number
    if at_end:
        raise at_end


def test_the_same_pieces_are_never_more_than_two_ahead() -> None:
    made: list[int] = []
    for number in read_ahead(numbers(100, made), 2):
        # What overwrites a piece in one of two buffers is made only once it is done with.
        assert len(made) <= number + 2
    assert made == list(range(100))


def test_pieces_are_made_while_the_one_before_is_in_use() -> None:
    second = threading.Event()

    def pieces() -> Iterator[str]:
        yield "first"
        second.set()
        yield "second"

    ahead = read_ahead(pieces(), 2)
    assert next(ahead) == "first"
    assert second.wait(20), "nobody asked for it yet, and it should be made"
    assert list(ahead) == ["second"]


def test_an_error_comes_after_the_pieces_before_it() -> None:
    ahead = read_ahead(numbers(3, [], OSError("gone")), 2)
    assert [next(ahead), next(ahead), next(ahead)] == [0, 1, 2]
    with pytest.raises(OSError, match="gone"):
        next(ahead)


def test_a_reader_that_gives_up_leaves_no_thread() -> None:
    before = threading.active_count()
    made: list[int] = []
    ahead = read_ahead(numbers(100, made), 2)
    assert next(ahead) == 0
    ahead.close()
    assert threading.active_count() == before
    assert len(made) <= 3
