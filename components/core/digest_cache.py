"""Digests and checks of adapters that have not changed, without reading them again.

What an adapter is, is remembered for its files' real path, size, mtime, ctime and inode; what is found in it, for its
digest and what it is checked against.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path

from components.core.adapter import read_located
from components.core.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterFiles,
    locate_adapter,
    real_directory,
    shown_path,
    unreadable,
)
from components.core.bundle import bundle_members, bundle_size, digest_bundle
from components.core.check.adapter_check import Against, around, check_adapter, check_files, placed
from components.core.errors import UserError
from components.core.findings import FaultError, Finding, fault
from components.core.memory import Memory

# A file system's clock may be as coarse as this (FAT: 2 s), so that a second write leaves the same times behind.
# The rule is git's: https://git-scm.com/docs/racy-git
RACY_NS = 2_000_000_000

# Modules whose change can change what an adapter is. Its digest takes a while, so that no other module is among them.
BUNDLE_RULES = (
    "adapter.py",
    "adapter_config.py",
    "adapter_files.py",
    "bundle.py",
    "digest_cache.py",
    "errors.py",
    "findings.py",
    "json_text.py",
    "safetensors_header.py",
)


@dataclass(frozen=True)
class BundleFacts:
    """What an adapter is: the digest and size of its bundle, and what its files say of themselves."""

    digest: str
    """`sha256:<64 hex digits>` of the bundle."""
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
    """An answer found by reading; `lasting` if the files cannot change without a trace in their times."""

    sight: _Sight
    answer: BundleFacts | UserError
    lasting: bool


class DigestCache:
    """Answers what an adapter's bundle is and what is wrong with it, from memory where nothing has changed.

    Args:
        path: the SQLite file; by default `lora-pods/digests.sqlite3` in the user's cache directory.
        clock: nanoseconds since the epoch, by the clock that stamps files.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], int] = time.time_ns) -> None:
        self._memory = Memory(path or default_path())
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
            self._remember(item for item in computed if item.lasting)
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
        changing = fault(
            shown_path(directory), "changing", "changed while it was being read; run again when nothing writes to it."
        )
        return _Computed(sight, changing, lasting=False)

    def check_all(self, items: Sequence[tuple[Path, BundleFacts | UserError, Against]]) -> list[list[Finding]]:
        """What is found in many adapters, each list sorted, in the same order; known ones are not opened.

        Args:
            items: a directory, what `describe_all` said of it, and what it is to be served by.
        """
        questions = [
            (path, _question(facts, against), facts.digest, against)
            for path, facts, against in items
            if isinstance(facts, BundleFacts)
        ]
        known = {
            question: _findings_from_json(text)
            for question, text in self._memory.recall(
                _check_rules(), {question: "" for _, question, _, _ in questions}
            ).items()
        }
        self._find_anew([each for each in questions if each[1] not in known], known)
        return [
            _live(path, facts, against)
            if isinstance(facts, UserError)
            else _with_surroundings(path, known[_question(facts, against)])
            for path, facts, against in items
        ]

    def _find_anew(self, strangers: Sequence[tuple[Path, str, str, Against]], known: dict[str, list[Finding]]) -> None:
        """Reads adapters, adds what is found to `known`, and remembers it where it is sure to last."""
        sights = {path: sight for path, *_ in strangers if isinstance(sight := _sight_or_error(path), _Sight)}
        described = self._recall(list(sights.values()))
        lasting = {}
        for path, question, digest, against in strangers:
            try:
                before = sights[path] if path in sights else _look(path)
                known[question] = check_files(before.files, against)
            except FaultError as error:
                known[question] = [error.finding]
                continue
            facts = described.get(before.key)
            # Only if what was read is what has the digest.
            if facts and facts.digest == digest and _sight_or_error(path) == before:
                lasting[question] = ("", _findings_to_json(known[question]))
        self._memory.remember(_check_rules(), lasting)

    def _recall(self, sights: Sequence[_Sight]) -> dict[str, BundleFacts]:
        found = self._memory.recall(_rules(), {sight.key: sight.fingerprint for sight in sights})
        return {key: _facts_from_json(text) for key, text in found.items()}

    def _remember(self, entries: Iterable[_Computed]) -> None:
        self._memory.remember(
            _rules(),
            {
                entry.sight.key: (entry.sight.fingerprint, json.dumps(asdict(entry.answer)))
                for entry in entries
                if isinstance(entry.answer, BundleFacts)
            },
        )


def default_path() -> Path | None:
    """`lora-pods/digests.sqlite3` in `$XDG_CACHE_HOME` or `~/.cache`; None for a user without a home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG Base Directory Specification: a relative path is to be ignored.
        caches = Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "lora-pods" / "digests.sqlite3"


@cache
def _rules() -> str:
    """The rules facts were found by: other rules (another version of this program) find them anew."""
    return _sources(BUNDLE_RULES)


@cache
def _check_rules() -> str:
    """The rules findings were found by: all of this package, since a check takes only milliseconds."""
    here = Path(__file__).parent
    return _sources(sorted(path.relative_to(here).as_posix() for path in here.rglob("*.py")))


def _sources(names: Iterable[str]) -> str:
    sha256 = hashlib.sha256()
    for name in names:
        sha256.update((Path(__file__).parent / name).read_bytes())
    return sha256.hexdigest()


def _look(directory: Path) -> _Sight:
    files = locate_adapter(directory)
    newest_ns = 0
    seen: list[tuple[str, str, int, int, int, int]] = []
    for name, path in ((CONFIG_NAME, files.config), (WEIGHTS_NAME, files.weights)):
        try:
            status = path.lstat()
        except OSError as error:
            raise unreadable(shown_path(directory / name), error) from None
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


def _question(facts: BundleFacts, against: Against) -> str:
    base_digest = against.base_model and against.base_model.digest
    return json.dumps([facts.digest, against.base, base_digest, against.vllm, against.lora_target_modules])


def _findings_to_json(findings: Iterable[Finding]) -> str:
    return json.dumps([astuple(finding) for finding in findings])


def _findings_from_json(text: str) -> list[Finding]:
    return [Finding(*fields) for fields in json.loads(text)]


def _with_surroundings(directory: Path, contents: Sequence[Finding]) -> list[Finding]:
    """What the files say, and what lies beside them now: looking at names is not opening anything."""
    try:
        return placed([*around(real_directory(directory)), *contents], directory)
    except FaultError as error:
        return [error.finding]


def _live(directory: Path, error: UserError, against: Against) -> list[Finding]:
    """What is wrong with an adapter that has no digest."""
    found = check_adapter(directory, against)
    if any(finding.severity == "error" for finding in found):
        return found
    if isinstance(error, FaultError):
        return [error.finding]
    return [
        Finding(shown_path(directory), "error", "unreadable", "", str(error).removeprefix(f"{shown_path(directory)}: "))
    ]
