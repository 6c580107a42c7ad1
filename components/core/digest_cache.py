"""Digests of adapters that have not changed, without reading them again.

What an adapter is, is remembered for its files' real path, size, mtime, ctime and inode.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from components.core.adapter import read_located
from components.core.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterFiles,
    locate_adapter,
    shown_path,
    unreadable,
)
from components.core.bundle import bundle_members, bundle_size, digest_bundle
from components.core.errors import UserError
from components.core.findings import fault
from components.core.memory import Memory
from components.core.meter import Meter, Say

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
    "listing.py",
    "lora_names.py",
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
class Sight:
    """An adapter as seen without opening a file."""

    files: AdapterFiles
    key: str
    fingerprint: str
    newest_ns: int


@dataclass(frozen=True)
class _Computed:
    """An answer found by reading; `lasting` if the files cannot change without a trace in their times."""

    sight: Sight
    answer: BundleFacts | UserError
    lasting: bool


class DigestCache:
    """Answers what an adapter's bundle is, from memory where nothing has changed.

    Args:
        path: the SQLite file; by default `lora-pods/digests.sqlite3` in the user's cache directory.
        clock: nanoseconds since the epoch, by the clock that stamps files.
        say: told how far it is where there is much to read.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], int] = time.time_ns, say: Say | None = None
    ) -> None:
        self.memory = Memory(path or default_path())
        """Whatever else is to be remembered of adapters lies in the same file."""
        self._clock = clock
        self._say = say

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
        sights: dict[Path, Sight | UserError] = {path: look_or_error(path) for path in directories}
        seen = {sight.key: sight for sight in sights.values() if isinstance(sight, Sight)}
        answers: dict[str, BundleFacts | UserError] = dict(self.recall(list(seen.values())))
        strangers = [sight for key, sight in seen.items() if key not in answers]
        if strangers:
            meter = Meter("hashing", len(strangers), sum(map(_bytes_of, strangers)), self._say)
            with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, len(strangers))) as pool:
                computed = list(pool.map(partial(self._compute_or_error, meter), strangers))
            meter.end("hashed")
            # By the key asked for: the directory itself may have become a link to another by now.
            for stranger, item in zip(strangers, computed, strict=True):
                answers[stranger.key] = item.answer
            self._remember(item for item in computed if item.lasting)
        return [sight if isinstance(sight := sights[path], UserError) else answers[sight.key] for path in directories]

    def _compute_or_error(self, meter: Meter, sight: Sight) -> _Computed:
        directory = sight.files.directory
        meter.begin("/".join(directory.parts[-2:]))
        try:
            for _ in range(2):
                began = self._clock()
                before = look(directory)
                try:
                    facts = _read_facts(before.files, meter)
                except UserError:
                    # Perhaps a file half written: only a directory at rest is judged.
                    if look(directory) == before:
                        raise
                    continue
                if look(directory) == before:
                    return _Computed(before, facts, lasting=before.newest_ns + RACY_NS < began)
        except UserError as error:
            return _Computed(sight, error, lasting=False)
        changing = fault(
            shown_path(directory), "changing", "changed while it was being read; run again when nothing writes to it."
        )
        return _Computed(sight, changing, lasting=False)

    def recall(self, sights: Sequence[Sight]) -> dict[str, BundleFacts]:
        """The facts that are remembered, by the key of the sight."""
        found = self.memory.recall(_rules(), {sight.key: sight.fingerprint for sight in sights})
        return {key: _facts_from_json(text) for key, text in found.items()}

    def _remember(self, entries: Iterable[_Computed]) -> None:
        self.memory.remember(
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
    return sources_digest(BUNDLE_RULES)


def sources_digest(names: Iterable[str]) -> str:
    """What tells one version of these modules of core from another; paths relative to core."""
    sha256 = hashlib.sha256()
    for name in names:
        sha256.update((Path(__file__).parent / name).read_bytes())
    return sha256.hexdigest()


def look(directory: Path) -> Sight:
    """Looks at an adapter without opening a file.

    Raises:
        UserError: a file is missing, is no plain file or cannot be looked at.
    """
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
    return Sight(files, key=json.dumps(str(files.real_directory)), fingerprint=json.dumps(seen), newest_ns=newest_ns)


def _bytes_of(sight: Sight) -> int:
    return sum(size for _, _, size, *_ in json.loads(sight.fingerprint))


def look_or_error(directory: Path) -> Sight | UserError:
    """`look`, with the error in place of an answer."""
    try:
        return look(directory)
    except UserError as error:
        return error


def _read_facts(files: AdapterFiles, meter: Meter) -> BundleFacts:
    adapter = read_located(files)
    members = bundle_members(adapter)
    return BundleFacts(
        digest=digest_bundle(members, meter.add),
        size=bundle_size(members),
        rank=adapter.rank,
        modules=adapter.modules,
        parameters=adapter.parameters,
        base=adapter.base,
    )


def _facts_from_json(text: str) -> BundleFacts:
    document = json.loads(text)
    return BundleFacts(**{**document, "modules": tuple(document["modules"])})
