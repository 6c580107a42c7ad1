"""The adapters of a stack as this machine sees them: by their bytes, and by the lock where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError, printable
from components.core.listing import item_number, listed, shared_place
from components.core.lock import LockEntry, differences, why_absent
from components.settings import Model, Settings
from components.stack_files import LockError, lock_place, read_lock


@dataclass(frozen=True)
class Present:
    """An adapter whose bytes are on this machine: what they are, or why nobody can say."""

    model: Model
    directory: Path
    answer: BundleFacts | UserError


@dataclass
class Looked:
    """`bundles` maps model ids to what their adapters are, `present` has those that are on this machine."""

    bundles: dict[str, BundleFacts] = field(default_factory=dict)
    present: list[Present] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look(settings: Settings, stack: str, cache: DigestCache) -> Looked:
    """Describe every adapter: the bytes win; where they are absent, the lock's entry stands in.

    A present adapter with a fault is in `present` alone, with its error: saying it is the caller's.
    """
    found = Looked()
    place = lock_place(settings.directory, stack)
    lock: dict[str, LockEntry] | None
    readable = True
    try:
        lock = read_lock(settings.directory, stack)
    except LockError as error:
        found.faults += error.faults
        lock, readable = None, False
    absent: list[tuple[Model, str]] = []
    models = [model for model in settings.models if model.adapter]
    directories = [settings.adapter_directory(model) for model in models]
    for model, directory, answer in zip(models, directories, cache.describe_all(directories), strict=True):
        reason = why_absent(directory) if isinstance(answer, UserError) else None
        if reason:
            absent.append((model, reason))
            continue
        found.present.append(Present(model, directory, answer))
        if isinstance(answer, BundleFacts):
            found.bundles[model.id] = answer
    stand_ins = {model.id: entry for model, _ in absent if (entry := _stand_in(lock, model))}
    found.bundles.update((model, entry.facts()) for model, entry in stand_ins.items())
    if readable:
        found.faults += _absences([each for each in absent if each[0].id not in stand_ins], settings, lock, stack)
        _compare(found, settings, lock, stack)
    if stand_ins:
        names = listed([printable(model) for model in sorted(stand_ins)])
        found.notes.append(
            f"{place} stands in for adapters that are not on this machine: {names}. They were checked when they were "
            "locked, not here"
        )
    return found


def _stand_in(lock: Mapping[str, LockEntry] | None, model: Model) -> LockEntry | None:
    entry = (lock or {}).get(model.id)
    return entry if entry and entry.fits(model.adapter or "", model.base) else None


def _absences(
    absent: Sequence[tuple[Model, str]], settings: Settings, lock: Mapping[str, LockEntry] | None, stack: str
) -> Iterator[str]:
    """One fault for all that are absent for the same reason, with nothing to stand in for the same reason."""
    place = lock_place(settings.directory, stack)
    groups: dict[tuple[str, str], list[Model]] = {}
    for model, reason in absent:
        if lock is None:
            without = f"there is no {place} to stand in"
        elif model.id in lock:
            without = f"{place} has another path or base"
        else:
            without = f"{place} has no entry"
        groups.setdefault((reason, without), []).append(model)
    for (reason, without), found in groups.items():
        found.sort(key=lambda each: item_number(settings.places[each.id]))  # as the places in front of them
        where = shared_place(settings.places[model.id] for model in found)
        names = listed([f"{printable(model.id)} at {printable(model.adapter)}" for model in found])
        one = len(found) == 1
        yield (
            f"{where}.adapter: {names}: {reason}, and {without} for {'it' if one else 'them'}; put the "
            f"adapter{'' if one else 's'} there, or run `lora lock -s {stack}` where {'it is' if one else 'they are'} "
            "and commit the lock"
        )


def _compare(found: Looked, settings: Settings, lock: Mapping[str, LockEntry] | None, stack: str) -> None:
    """Say where the lock says something else than the bytes; as a fault, if the stack file asks for that."""
    place = lock_place(settings.directory, stack)
    again = f"`lora lock -s {stack}`"
    if lock is None:
        if settings.require_lock and any(model.adapter for model in settings.models):
            found.faults.append(f"requireLock: there is no {place}; write it with {again} and commit it")
        return
    models = {model.id: model for model in settings.models if model.adapter}
    here = {
        each.model.id: LockEntry.of(each.answer, each.model.adapter or "", each.model.base)
        for each in found.present
        if isinstance(each.answer, BundleFacts)
    }
    # Of what is absent or faulty, nothing is known that the lock could contradict.
    said = {model: entry for model, entry in lock.items() if model in here or model not in models}
    stale = differences(said, here)
    if not stale:
        return
    count = f"{len(stale)} adapters" if len(stale) > 1 else "an adapter"
    what = f"{place} says otherwise of {count}: {listed(stale)}"
    if settings.require_lock:
        found.faults.append(
            f"requireLock: {what}; write it anew with {again} and commit it, or bring back what it names"
        )
    else:
        found.warnings.append(f"{what}. The adapters on this machine count; write the lock anew with {again}")
