"""`<stack>.lock.yaml`: what each adapter of a stack is, for machines that have no adapter's bytes.

The text is written here, by hand, so that it reads well in a git diff: one block per model, sorted by id, what changes
most at the top, so that the three lines of context of a change always name its model. It is read as YAML elsewhere
(`stack_files`); here the document becomes entries, or faults.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from components.core.adapter_files import CONFIG_NAME, ENTRIES_LOOKED_AT, WEIGHTS_NAME, is_plain_file
from components.core.digest_cache import BundleFacts
from components.core.errors import printable
from components.core.json_text import LFS_POINTER
from components.core.listing import listed

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
COUNT = re.compile(r"0|[1-9][0-9]{0,17}")
SHORT_DIGEST = 12
POINTER_LIMIT = 1024  # bytes: that of Git LFS's specification; one of git-annex is a line

# What YAML 1.1 and 1.2 read as the text it is when it stands without quotes.
_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z][A-Za-z0-9._/-]*")
_NOT_TEXT = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}

_POINTERS = {LFS_POINTER: "Git LFS", b"/annex/objects/": "git-annex"}


@dataclass(frozen=True)
class LockEntry:
    """One model's adapter. `adapter` and `base` are what the stack file says; the rest is what the bytes say."""

    digest: str
    """`sha256:<64 hex digits>` of the bundle."""
    adapter: str
    base: str
    size: int
    """Bytes of the bundle."""
    rank: int
    """The largest real rank."""
    modules: tuple[str, ...]
    parameters: int

    @classmethod
    def of(cls, facts: BundleFacts, adapter: str, base: str) -> LockEntry:
        return cls(facts.digest, adapter, base, facts.size, facts.rank, facts.modules, facts.parameters)

    def fits(self, adapter: str, base: str) -> bool:
        """Whether it is about the adapter that the stack file names now."""
        return posixpath.normpath(self.adapter) == posixpath.normpath(adapter) and self.base == base

    def facts(self) -> BundleFacts:
        """What stands in for the bytes; without the trainer's name for the base, which may be a private path."""
        return BundleFacts(self.digest, self.size, self.rank, self.modules, self.parameters, base=None)


@dataclass(frozen=True)
class Difference:
    """What became of one model's entry: `old` is None where it is new, `new` where it is gone."""

    model: str
    old: LockEntry | None
    new: LockEntry | None

    @property
    def reason(self) -> str:
        """What is different, where the digest is not: `another path`."""
        keys = [key for key in LockEntry.__dataclass_fields__ if getattr(self.old, key) != getattr(self.new, key)]
        return f"another {' and '.join('path' if key == 'adapter' else key for key in keys)}"

    def __str__(self) -> str:
        if self.old and self.new:
            if self.old.digest == self.new.digest:
                return f"{printable(self.model)} ({self.reason})"
            return f"{printable(self.model)} {short_digest(self.old.digest)} → {short_digest(self.new.digest)}"
        if self.new:
            return f"{printable(self.model)} {short_digest(self.new.digest)} (not in it)"
        return f"{printable(self.model)} (no longer in the stack)"


def lock_name(stack: str) -> str:
    """The lock's file name, beside the stack file."""
    return f"{stack}.lock.yaml"


def short_digest(digest: str) -> str:
    """As many hex digits as a person compares."""
    return digest.removeprefix("sha256:")[:SHORT_DIGEST]


def differences(old: Mapping[str, LockEntry], new: Mapping[str, LockEntry]) -> list[Difference]:
    """What differs, sorted by model."""
    models = sorted({*old, *new})
    return [Difference(m, old.get(m), new.get(m)) for m in models if old.get(m) != new.get(m)]


def lock_text(stack: str, entries: Mapping[str, LockEntry]) -> str:
    """The whole file."""
    lines = [
        f"# What each adapter of this stack is, for machines that do not have them. Written by `lora lock -s {stack}`: "
        "commit it, do not edit it."
    ]
    lines.append("models:" if entries else "models: {}")
    for model, entry in sorted(entries.items()):
        lines += [
            f"  {_scalar(model)}:",
            f"    digest: {entry.digest}",
            f"    adapter: {_scalar(entry.adapter)}",
            f"    base: {_scalar(entry.base)}",
            f"    size: {entry.size}",
            f"    rank: {entry.rank}",
            f"    modules: [{', '.join(map(_scalar, entry.modules))}]",
            f"    parameters: {entry.parameters}",
        ]
    return "\n".join(lines) + "\n"


def lock_entries(document: object) -> tuple[dict[str, LockEntry], list[str]]:
    """The entries of a lock, and its faults, each with its path. Scalars of `document` are text, as it stands there."""
    faults: list[str] = []
    entries: dict[str, LockEntry] = {}
    top = _mapping(document, "", ("models",), faults)
    models = top.get("models") if top else None
    if top and not isinstance(models, Mapping):
        faults.append("models: must map model ids to what their adapters are")
    for model, value in models.items() if isinstance(models, Mapping) else ():
        place = f"models.{printable(model)}"
        found = _mapping(value, place, tuple(LockEntry.__dataclass_fields__), faults)
        before = len(faults)
        if found:
            faults += _entry_faults(found, place)
            if len(faults) == before:
                entries[model] = _entry(found)
    return entries, faults


def why_absent(directory: Path) -> str | None:
    """Why an adapter's bytes are not on this machine, as a clause; None where they are, sound or not.

    Absent is what a checkout without the weights looks like: no directory, a directory without weights or with DVC's
    `adapter_model.safetensors.dvc` alone, a link to nothing (git-annex, DVC) or a pointer, of Git LFS
    (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md) or of git-annex where a file is unlocked
    (https://git-annex.branchable.com/internals/pointer_file/).
    """
    weights = directory / WEIGHTS_NAME
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return "no such directory"
    except (OSError, ValueError, RuntimeError):
        return None
    try:
        status = weights.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= POINTER_LIMIT:
            kind = _pointer(weights.read_bytes())
            return f"its {WEIGHTS_NAME} is a {kind} pointer" if kind else None
    except FileNotFoundError:
        if weights.is_symlink():
            return f"its {WEIGHTS_NAME} is a link to nothing"
        return None if _holds_something_else(directory) else f"holds no {WEIGHTS_NAME}"
    except (OSError, RuntimeError):
        pass
    return None


def _pointer(content: bytes) -> str | None:
    """Whose pointer it is that stands in the weights' place; None if it is none."""
    return next((kind for beginning, kind in _POINTERS.items() if content.startswith(beginning)), None)


def _holds_something_else(directory: Path) -> bool:
    """Weights under another name or in shards, or adapters in folders: a fault of its own, not an absence."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, ENTRIES_LOOKED_AT) if not entry.name.endswith(".dvc")]
    except OSError:
        return True
    return any(
        name.startswith("adapter_model")
        or name.endswith(".safetensors")
        or is_plain_file(directory / name / CONFIG_NAME)
        for name in names
    )


def _mapping(value: object, place: str, keys: Sequence[str], faults: list[str]) -> Mapping[str, object] | None:
    """`value` if it is a mapping of exactly these keys."""
    prefix = f"{place}: " if place else ""
    if not isinstance(value, Mapping):
        faults.append(f"{prefix}must be a mapping of {', '.join(keys)}")
        return None
    unknown = [printable(key) for key in value if key not in keys]
    missing = [key for key in keys if key not in value]
    if unknown:
        faults.append(f"{prefix}unknown key {listed(unknown)}; known here: {', '.join(keys)}")
    if missing:
        faults.append(f"{prefix}{', '.join(missing)} missing")
    return value if not unknown and not missing else None


def _entry_faults(found: Mapping[str, object], place: str) -> Iterator[str]:
    for key in ("adapter", "base"):
        if not isinstance(found[key], str) or not found[key]:
            yield f"{place}.{key}: must be a text, as the stack file has it"
    digest = found["digest"]
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        yield f"{place}.digest: must be sha256: and 64 hex digits in lower case{_instead_of(digest)}"
    for key in ("size", "rank", "parameters"):
        value = found[key]
        if not isinstance(value, str) or not COUNT.fullmatch(value) or (value == "0" and key != "parameters"):
            yield f"{place}.{key}: must be a whole number, as `lora lock` writes it{_instead_of(value)}"
    modules = found["modules"]
    if not isinstance(modules, Sequence) or isinstance(modules, str) or not all(isinstance(m, str) for m in modules):
        yield f"{place}.modules: must be a list of names"


def _instead_of(value: object) -> str:
    return f", not {printable(value, limit=80)!r}" if isinstance(value, str) else ""


def _entry(found: Mapping[str, object]) -> LockEntry:
    modules = found["modules"]
    assert isinstance(modules, Sequence)
    return LockEntry(
        digest=str(found["digest"]),
        adapter=str(found["adapter"]),
        base=str(found["base"]),
        size=int(str(found["size"])),
        rank=int(str(found["rank"])),
        modules=tuple(map(str, modules)),
        parameters=int(str(found["parameters"])),
    )


def _scalar(text: str) -> str:
    """A text as YAML: without quotes where every reader of YAML takes it for text, in double quotes otherwise."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in _ESCAPES or char.isprintable():
        return _ESCAPES.get(char, char)
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
