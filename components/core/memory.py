"""Answers that were found once, in a SQLite file that may be lost or damaged at any time.

Whatever is wrong with the file costs time, never an error and never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

BUSY_SECONDS = 5.0
KEYS_PER_QUERY = 500
ROWS_KEPT = 100_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    rules TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, seal TEXT NOT NULL,
    UNIQUE (rules, question)
)
"""


class Memory:
    """Answers by question. Both are JSON in ASCII; an answer holds for one state of the world and one set of rules."""

    def __init__(self, path: Path | None) -> None:
        """`path` is the SQLite file; None remembers nothing."""
        self._path = path

    def recall(self, rules: str, states: Mapping[str, str]) -> dict[str, str]:
        """Answers to those questions whose state is the one they were remembered with. One look into the file."""

        def select(database: sqlite3.Connection) -> dict[str, str]:
            found = {}
            questions = list(states)
            for start in range(0, len(questions), KEYS_PER_QUERY):
                asked = questions[start : start + KEYS_PER_QUERY]
                rows: Iterable[tuple[object, ...]] = database.execute(
                    "SELECT question, answer, seal FROM answers WHERE rules = ? AND question IN "
                    f"({','.join('?' * len(asked))})",
                    (rules, *asked),
                )
                for question, answer, seal in rows:
                    if not (isinstance(question, str) and isinstance(answer, str) and question in states):
                        continue
                    if seal == _seal(rules, question, states[question], answer):
                        found[question] = answer
            return found

        return (self._with_database(select) if states else None) or {}

    def remember(self, rules: str, answers: Mapping[str, tuple[str, str]]) -> None:
        """Keeps the state and the answer of each question, and forgets the oldest of very many."""
        rows = [
            (rules, question, answer, _seal(rules, question, state, answer))
            for question, (state, answer) in answers.items()
        ]

        def insert(database: sqlite3.Connection) -> None:
            with database:
                database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
                database.execute(
                    "DELETE FROM answers WHERE rowid <= (SELECT max(rowid) FROM answers) - ?", (ROWS_KEPT,)
                )

        if rows:
            self._with_database(insert)

    def _with_database(self, use: Callable[[sqlite3.Connection], Result]) -> Result | None:
        if self._path is None:
            return None
        for _ in range(2):
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with closing(sqlite3.connect(self._path, timeout=BUSY_SECONDS)) as database:
                    database.execute("PRAGMA journal_mode = WAL")
                    database.execute("PRAGMA synchronous = NORMAL")
                    database.execute(_SCHEMA)
                    return use(database)
            # Locked for too long, not writable, disk full: do without.
            except (sqlite3.OperationalError, OSError, ValueError):
                return None
            # Not a database, or a damaged one: start anew.
            except sqlite3.DatabaseError:
                _discard(self._path)
        return None


def _discard(path: Path) -> None:
    for suffix in ("-wal", "-shm", ""):
        with suppress(OSError):
            path.with_name(path.name + suffix).unlink()


def _seal(rules: str, question: str, state: str, answer: str) -> str:
    """What makes an answer true: the rules, the question and the state of the world. A damaged row has another seal."""
    return hashlib.sha256(json.dumps([rules, question, state, answer]).encode("ascii")).hexdigest()
