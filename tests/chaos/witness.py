"""What a client was answered, held against when an engine served: that is read from the pod's own journal.

An engine serves from its line that it listens, until systemd says that it stops it, or that its process ended, or
until it or the whole pod is killed. A question that began and ended within such a time must have its right answer; all
others met a restart. What the journal had yet to write when the pod was killed is not in it: so a question without an
answer counts as lost where systemd, asked by the client at once, said that the same process was still active.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# From systemd's catalogue (sd-messages.h).
STOPPING, EXITED = "de5b426a63be47a7b6ac3eaac82e2f6f", "98e322203f7a4ed290d09fe03c09fe15"
LISTENS = "Uvicorn running on "
# systemd writes that it stops a unit right after it has told it to.
EDGE_SECONDS = 0.1


@dataclass(frozen=True)
class Asked:
    """One question of a client, and what came of it; `status` 0 is no answer."""

    began: float
    ended: float
    model: str
    status: int
    said: str
    engine: str = ""

    @property
    def weights(self) -> str:
        return self.said.partition("weights=")[2].partition(" ")[0]


@dataclass(frozen=True)
class Serving:
    """A time in which one engine served; `pid` is its process on the pod."""

    since: float
    until: float
    pid: str = ""

    def covers(self, asked: Asked) -> bool:
        return self.since <= asked.began and asked.ended <= self.until - EDGE_SECONDS


@dataclass(frozen=True)
class Testimony:
    served: Sequence[Serving]
    asked: int
    met_restart: int
    lost: Sequence[Asked]

    def __str__(self) -> str:
        return f"{self.asked} asked, {len(self.lost)} lost, {self.met_restart} met a restart"


def servings(journal: Iterable[Mapping[str, object]], kills: Iterable[float], unit: str) -> list[Serving]:
    """`journal` holds journald's entries of the unit, by it and about it; `kills` when we killed it or its pod."""
    began, ends = [], list(kills)
    for entry in journal:
        if entry.get("MESSAGE_ID") in (STOPPING, EXITED) and entry.get("UNIT") == unit:
            ends.append(int(str(entry.get("_SOURCE_REALTIME_TIMESTAMP") or entry["__REALTIME_TIMESTAMP"])) / 1e6)
        elif entry.get("_SYSTEMD_UNIT") == unit and str(entry.get("MESSAGE", "")).startswith(LISTENS):
            began.append((int(str(entry["__REALTIME_TIMESTAMP"])) / 1e6, str(entry["_PID"])))
    return [
        Serving(since, min((end for end in ends if end > since), default=float("inf")), pid)
        for since, pid in sorted(began)
    ]


def judged(served: Sequence[Serving], asked: Sequence[Asked], right: Mapping[str, Sequence[str]]) -> Testimony:
    """`right` maps each model to the weights of which one must have answered."""
    lost, met_restart = [], 0
    for question in asked:
        engine = next((each for each in served if each.covers(question)), None)
        if engine is None or (question.engine and question.engine != f"active {engine.pid}"):
            met_restart += 1
        elif question.status != 200 or question.weights not in right[question.model]:
            lost.append(question)
    return Testimony(served, len(asked), met_restart, lost)


class Client:
    """The client's questions and answers, as they come; it is started again where its pod was."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]]) -> None:
        self.asked: list[Asked] = []
        self._start, self._over = start, threading.Event()
        self._process = start()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def answered_since(self, moment: float) -> bool:
        return any(each.status == 200 for each in self.asked[-100:] if each.began > moment)

    def taken(self) -> list[Asked]:
        """What was asked since the last time."""
        taken, self.asked = self.asked, []
        return taken

    def close(self) -> None:
        self._over.set()
        self._process.kill()
        self._thread.join()

    def _listen(self) -> None:
        while not self._over.is_set():
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("{") and line.endswith("}\n"):
                    self.asked.append(Asked(**json.loads(line)))
            self._process.wait()
            if not self._over.wait(0.2):
                self._process = self._start()
