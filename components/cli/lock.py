"""`lora lock -s STACK`: writes what each adapter of a stack is to `<stack>.lock.yaml`. No pulumi, no secrets."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.checked import verdict_on
from components.core.digest_cache import DigestCache
from components.core.errors import UserError, printable
from components.core.listing import counted, listed
from components.core.lock import Difference, LockEntry, differences, short_digest, why_absent
from components.locked import Present
from components.settings import PROJECT, Model, RawConfig, Settings, SettingsError, parse_models
from components.stack_files import LockError, lock_place, read_lock, stack_config, stack_directory, write_lock


@dataclass(frozen=True)
class _Looked:
    """What is known of a stack's adapters now: entries to write, models whose old entry is kept, models without any.

    `warnings` is what the check of those on this machine found.
    """

    entries: Mapping[str, LockEntry]
    kept: Sequence[str]
    unknown: Sequence[str]
    warnings: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write stacks/STACK.lock.yaml: what each adapter of the stack is, so that a preview works where the adapters "
        "are not. They are checked as `pulumi preview` checks them, and nothing is written if there are errors. "
        "Adapters that are not on this machine keep their entries."
    )
    parser.add_argument("-s", "--stack", required=True, help="the stack's name: that of stacks/Pulumi.STACK.yaml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the lock would change")


def run(args: argparse.Namespace) -> int:
    """0: the lock is right now; 1: something is missing or at fault, or, with --check, the lock would change.

    Raises UserError where there is no such stack here.
    """
    directory = stack_directory()
    config = stack_config(directory, args.stack, PROJECT)
    try:
        return _lock(directory, args.stack, config, args.check)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


def _lock(directory: Path, stack: str, config: RawConfig, check: bool) -> int:
    place = lock_place(directory, stack)
    settings, faults = parse_models(config)
    if faults:
        raise SettingsError(faults)
    unreadable: LockError | None = None
    try:
        old = read_lock(directory, stack)
    except LockError as error:
        old, unreadable = None, error
    found = _look(settings, old or {})
    if unreadable and found.unknown:
        # What the lock says of those is lost if it is written anew without them.
        raise unreadable
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    changes = differences(old or {}, found.entries)
    # A lock that would say nothing, since nothing is here, helps nobody.
    changed = bool(changes) or (old is None and not found.unknown)
    if changed and not check:
        write_lock(directory, stack, found.entries)
    if changed or found.entries or not found.unknown:
        _tell(place, changes, changed, check, found)
    if found.unknown:
        print(
            f"{place}: has no entry that fits {listed(found.unknown)}, which this machine does not have; "
            f"run `lora lock -s {stack}` where they are",
            file=sys.stderr,
        )
    return 1 if found.unknown or (check and changed) else 0


def _look(settings: Settings, old: Mapping[str, LockEntry]) -> _Looked:
    cache = DigestCache()
    models = [model for model in settings.models if model.adapter]
    directories = [settings.adapter_directory(model) for model in models]
    entries: dict[str, LockEntry] = {}
    present, kept, unknown = [], [], []
    for model, directory, answer in zip(models, directories, cache.describe_all(directories), strict=True):
        if not isinstance(answer, UserError):
            entries[model.id] = LockEntry.of(answer, _adapter(model), model.base)
            present.append(Present(model, directory, answer))
        elif not why_absent(directory):
            present.append(Present(model, directory, answer))
        elif model.id in old and old[model.id].fits(_adapter(model), model.base):
            entries[model.id] = old[model.id]
            kept.append(model.id)
        else:
            unknown.append(model.id)
            # Of no use as it is, and not ours to lose.
            entries.update({model.id: old[model.id]} if model.id in old else {})
    verdict = verdict_on(present, settings, cache)
    if verdict.faults:
        raise SettingsError(verdict.faults, verdict.warnings)
    return _Looked(entries, kept, unknown, verdict.warnings)


def _adapter(model: Model) -> str:
    return model.adapter or ""


def _tell(place: str, changes: Sequence[Difference], changed: bool, check: bool, found: _Looked) -> None:
    for change in changes:
        print(_line(change))
    adapters = counted(len(found.entries), "adapter")
    if not changed:
        print(f"{place}: is right ({adapters}); nothing to write")
    else:
        kinds = Counter("added" if not each.old else "changed" if each.new else "removed" for each in changes)
        summary = ", ".join([adapters, *(f"{count} {kind}" for kind, count in sorted(kinds.items()))])
        print(f"{place}: {'would be written' if check else 'written'} ({summary})")
    if found.kept:
        print(f"not on this machine, entries kept: {listed(found.kept)}")


def _line(change: Difference) -> str:
    model, old, new = printable(change.model), change.old, change.new
    if old and new:
        what = f"{short_digest(old.digest)} → {short_digest(new.digest)}" if old.digest != new.digest else change.reason
        return f"  ~ {model}  {what}"
    return f"  + {model}  {short_digest(new.digest)}" if new else f"  - {model}"
