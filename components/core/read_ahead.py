"""A generator at work in a thread of its own, so that what it reads is there when it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import TypeVar

Piece = TypeVar("Piece")


def read_ahead(pieces: Iterator[Piece], depth: int) -> Generator[Piece, None, None]:
    """The same pieces in the same order, up to `depth` of them made before the first is done with.

    A piece is done with when the next is asked for. What `pieces` raises is raised here, after the pieces before it.
    """
    made: SimpleQueue[Piece | None] = SimpleQueue()
    room = threading.Semaphore(depth)
    given_up = threading.Event()
    raised: list[BaseException] = []

    def make() -> None:
        try:
            while room.acquire() and not given_up.is_set():
                made.put(next(pieces))
        except StopIteration:
            pass
        except BaseException as error:
            raised.append(error)
        made.put(None)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (piece := made.get()) is not None:
            yield piece
            room.release()
    finally:
        given_up.set()
        room.release()
        thread.join()
    if raised:
        raise raised[0]
