"""How far long work is: a line now and then, for whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TypeAlias

from components.core.errors import printable
from components.core.sizes import shown_size

SAY_SECONDS = 1.0
"""Before the first line, which short work never comes to, and between two."""

Say: TypeAlias = Callable[[str], None]


class Meter:
    """Bytes of some items, `total` in all, that one verb goes through: `hashing acme/v1 (2 of 3): 1.1 of 1.6 GiB, …`.

    Several threads may use it. Without `say` it does nothing.
    """

    def __init__(
        self, verb: str, items: int, total: int, say: Say | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verb, self._items, self._total, self._say, self._clock = verb, items, total, say, clock
        self._said = False
        self._lock = Lock()
        self._began = clock()
        self._due = self._began + SAY_SECONDS
        self._name, self._begun, self._done = "", 0, 0

    def begin(self, name: str) -> None:
        """The bytes that follow are this item's, or those of others that are still under way."""
        with self._lock:
            self._name, self._begun = name, self._begun + 1

    def add(self, count: int) -> None:
        if self._say is None:
            return
        with self._lock:
            self._done += count
            now = self._clock()
            if now < self._due:
                return
            self._due, self._said = now + SAY_SECONDS, True
            line = self._line(now - self._began)
        self._say(line)

    def through(self, name: str, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        """The chunks of an item, counted once whoever takes them is done with them."""
        self.begin(name)
        for chunk in chunks:
            yield chunk
            self.add(len(chunk))

    def end(self, verb: str) -> None:
        """Say what was done, if anything was said before: a console shows the last line until there is another."""
        if self._say and self._said:
            self._say(f"{verb} {shown_size(min(self._done, self._total))} in {self._clock() - self._began:.0f} s")

    def _line(self, seconds: float) -> str:
        where = f" ({self._begun} of {self._items})" if self._items > 1 else ""
        done = f"{shown_size(min(self._done, self._total))} of {shown_size(self._total)}"
        return f"{self._verb} {printable(self._name)}{where}: {done}, {shown_size(self._done / seconds)}/s"


def paced(say: Say | None, clock: Callable[[], float] = time.monotonic) -> Say | None:
    """Says what somebody else says, and passes over lines that come too fast."""
    if say is None:
        return None
    due = clock()

    def say_now_and_then(line: str) -> None:
        nonlocal due
        if (now := clock()) >= due:
            due = now + SAY_SECONDS
            say(line)

    return say_now_and_then
