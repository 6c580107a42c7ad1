"""Digests of adapters that have not changed, without reading them again.

An entry says what an adapter was when its files had this real path, size, mtime, ctime and inode. It is a memory
only: whatever is wrong with the database costs time, never an error and never a wrong answer.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from components.core import adapter as adapter_module
from components.core import bundle as bundle_module
from components.core.adapter import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, locate_adapter, read_located, shown_path
from components.core.bundle import bundle_members, bundle_size, digest_bundle
from components.core.errors import UserError, os_reason

Result = TypeVar("Result")

# A file system's clock may be as coarse as this (FAT: 2 s), so that a second write leaves the same times behind.
# The rule is git's: https://git-scm.com/docs/racy-git
RACY_NS = 2_000_000_000

BUSY_SECONDS = 5.0
KEYS_PER_QUERY = 500
ROWS_KEPT = 100_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bundles (
    rules TEXT NOT NULL, directory TEXT NOT NULL, facts TEXT NOT NULL, seal TEXT NOT NULL,
    UNIQUE (rules, directory)
)
"""


@dataclass(frozen=True)
class BundleFacts:
    """What an adapter is: the digest and size of its bundle, and what its files say of themselves."""

    digest: str
    """``sha256:<64 hex digits>`` of the bundle."""
    size: int
    """Bytes of the bundle (the tar)."""
    rank: int
    modules: tuple[str, ...]
    parameters: int
    base: str | None


@dataclass(frozen=True)
class _Sight:
    """An adapter as seen without opening a file."""

    files: AdapterFiles
    key: str
    fingerprint: str
    newest_ns: int


@dataclass(frozen=True)
class _Computed:
    """An answer found by reading; ``lasting`` if the files cannot change without a trace in their times."""

    sight: _Sight
    answer: BundleFacts | UserError
    lasting: bool


class DigestCache:
    """Answers what an adapter's bundle is, from memory where nothing has changed.

    Args:
        path: the SQLite file; by default ``lora-pods/digests.sqlite3`` in the user's cache directory.
        clock: nanoseconds since the epoch, by the clock that stamps files.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], int] = time.time_ns) -> None:
        self._path = path or default_path()
        self._clock = clock

    def describe(self, directory: Path) -> BundleFacts:
        """The facts of one adapter. On a hit, no file of it is opened.

        Raises:
            UserError: the adapter is faulty, or kept changing while it was being read.
        """
        (answer,) = self.describe_all([directory])
        if isinstance(answer, UserError):
            raise answer
        return answer

    def describe_all(self, directories: Sequence[Path]) -> list[BundleFacts | UserError]:
        """The facts of many adapters, in the same order: one look into the database, hashing on all cores.

        A faulty adapter's place holds its error, so that one fault does not hide another.
        """
        sights: dict[Path, _Sight | UserError] = {path: _sight_or_error(path) for path in directories}
        seen = {sight.key: sight for sight in sights.values() if isinstance(sight, _Sight)}
        answers: dict[str, BundleFacts | UserError] = dict(self._recall(list(seen.values())))
        strangers = [sight for key, sight in seen.items() if key not in answers]
        if strangers:
            with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, len(strangers))) as pool:
                computed = list(pool.map(self._compute_or_error, strangers))
            # By the key asked for: the directory itself may have become a link to another by now.
            for stranger, item in zip(strangers, computed, strict=True):
                answers[stranger.key] = item.answer
            self._remember([item for item in computed if item.lasting])
        return [sight if isinstance(sight := sights[path], UserError) else answers[sight.key] for path in directories]

    def _compute_or_error(self, sight: _Sight) -> _Computed:
        directory = sight.files.directory
        try:
            for _ in range(2):
                began = self._clock()
                before = _look(directory)
                try:
                    facts = _read_facts(before.files)
                except UserError:
                    # Perhaps a file half written: only a directory at rest is judged.
                    if _look(directory) == before:
                        raise
                    continue
                if _look(directory) == before:
                    return _Computed(before, facts, lasting=before.newest_ns + RACY_NS < began)
        except UserError as error:
            return _Computed(sight, error, lasting=False)
        changing = UserError(
            f"{shown_path(directory)}: changed while it was being read; run again when nothing writes to it."
        )
        return _Computed(sight, changing, lasting=False)

    # --- the database: every failure is an empty answer ---------------------------------------------------

    def _recall(self, sights: Sequence[_Sight]) -> dict[str, BundleFacts]:
        def select(database: sqlite3.Connection) -> dict[str, BundleFacts]:
            found = {}
            for start in range(0, len(sights), KEYS_PER_QUERY):
                wanted = {sight.key: sight.fingerprint for sight in sights[start : start + KEYS_PER_QUERY]}
                marks = ",".join("?" * len(wanted))
                rows: Iterable[tuple[object, ...]] = database.execute(
                    f"SELECT directory, facts, seal FROM bundles WHERE rules = ? AND directory IN ({marks})",
                    (_rules(), *wanted),
                )
                for key, facts, seal in rows:
                    if not (isinstance(key, str) and isinstance(facts, str) and key in wanted):
                        continue
                    if seal == _seal(key, wanted[key], facts):
                        found[key] = _facts_from_json(facts)
            return found

        return (self._with_database(select) if sights else None) or {}

    def _remember(self, entries: Sequence[_Computed]) -> None:
        def insert(database: sqlite3.Connection) -> None:
            rows = []
            for entry in entries:
                if isinstance(entry.answer, BundleFacts):
                    sight, text = entry.sight, json.dumps(asdict(entry.answer))
                    seal = _seal(sight.key, sight.fingerprint, text)
                    rows.append((_rules(), sight.key, text, seal))
            with database:
                database.executemany("INSERT OR REPLACE INTO bundles VALUES (?, ?, ?, ?)", rows)
                database.execute(
                    "DELETE FROM bundles WHERE rowid <= (SELECT max(rowid) FROM bundles) - ?", (ROWS_KEPT,)
                )

        if entries:
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
                self._discard(self._path)
        return None

    @staticmethod
    def _discard(path: Path) -> None:
        for suffix in ("-wal", "-shm", ""):
            with suppress(OSError):
                path.with_name(path.name + suffix).unlink()


def default_path() -> Path | None:
    """``lora-pods/digests.sqlite3`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None for a user without a home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG Base Directory Specification: a relative path is to be ignored.
        caches = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "lora-pods" / "digests.sqlite3"


@cache
def _rules() -> str:
    """The rules an answer was found by: other rules (another version of this program) find it anew."""
    sha256 = hashlib.sha256()
    for source in (adapter_module.__file__, bundle_module.__file__, __file__):
        sha256.update(Path(source).read_bytes())
    return sha256.hexdigest()


def _look(directory: Path) -> _Sight:
    files = locate_adapter(directory)
    newest_ns = 0
    seen: list[tuple[str, str, int, int, int, int]] = []
    for name, path in ((CONFIG_NAME, files.config), (WEIGHTS_NAME, files.weights)):
        try:
            status = path.lstat()
        except OSError as error:
            raise UserError(f"{shown_path(directory / name)}: cannot be read ({os_reason(error)}).") from None
        seen.append((name, str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
        newest_ns = max(newest_ns, status.st_mtime_ns, status.st_ctime_ns)
    return _Sight(files, key=json.dumps(str(files.real_directory)), fingerprint=json.dumps(seen), newest_ns=newest_ns)


def _sight_or_error(directory: Path) -> _Sight | UserError:
    try:
        return _look(directory)
    except UserError as error:
        return error


def _read_facts(files: AdapterFiles) -> BundleFacts:
    adapter = read_located(files)
    members = bundle_members(adapter)
    return BundleFacts(
        digest=digest_bundle(members),
        size=bundle_size(members),
        rank=adapter.rank,
        modules=adapter.modules,
        parameters=adapter.parameters,
        base=adapter.base,
    )


def _facts_from_json(text: str) -> BundleFacts:
    document = json.loads(text)
    return BundleFacts(**{**document, "modules": tuple(document["modules"])})


def _seal(key: str, fingerprint: str, facts: str) -> str:
    """What makes facts true: the rules, the directory and its files as they were. A damaged row has another seal."""
    return hashlib.sha256(json.dumps([_rules(), key, fingerprint, facts]).encode("ascii")).hexdigest()
