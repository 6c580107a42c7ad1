"""`lora gc-store`: lists, and with --delete removes, what a store holds and nothing refers to.

Everything that any lock, stack file or deployed stack names is kept, whichever store it uses: what cannot be read could
name anything, so that nothing is removed then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from components.cli.pulumi_cli import ask_pulumi
from components.cli.push import no_store
from components.cli.shown import shown_age
from components.core.adapter_files import shown_path
from components.core.digest_cache import DigestCache
from components.core.errors import UserError, os_reason, printable
from components.core.listing import counted, listed
from components.core.lock import DIGEST, why_absent
from components.core.sizes import shown_size
from components.settings import PROJECT, RawConfig, Settings, parse_models, unknown_key_faults
from components.stack_files import LockError, holds_alone, read_lock, stack_config, stack_directory
from components.store_url import StoreUrl, parse_store_url
from components.supply import opened

if TYPE_CHECKING:
    from components.store import BundleStore, Stored, Unfinished

AGE = re.compile(r"(?P<count>[0-9]{1,5})(?P<unit>[dh])")
LOCK_SUFFIX = ".lock.yaml"
PULUMIS_AT_ONCE = 4
DEPLOYED = "what deployed stacks hold"
NEVER_DEPLOYED = ("Pulumi.example.yaml",)
"""Stack files that are there to be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the bundles in a store that nothing refers to and that are older than an age, and unfinished uploads of "
        "that age; with --delete, remove them. Referred to is what any lock or deployed stack names and what the "
        "adapters of any stack file here are, whichever store that stack uses. Deployed stacks are those that pulumi "
        "finds for this project where it is logged in; it is asked for no passphrase. Objects that are no bundles "
        "are left alone. Nothing is removed where a lock or a stack file is not understood, or where pulumi does not "
        "know the stack of a stack file here that names a store (stacks/Pulumi.example.yaml aside): it may be "
        "deployed elsewhere."
    )
    parser.epilog = (
        "The age protects what another checkout pushed and did not commit or deploy yet: let it be longer than a "
        "branch lives. It counts from the first time: a bundle that is there does not become younger when it is pushed "
        "again. What older commits and other checkouts name is protected by --keep alone."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-s", "--stack", help="the store of this stack: of stacks/Pulumi.STACK.yaml")
    where.add_argument(
        "--store", metavar="URL", type=_url, help="the store itself, as a stack file has it: s3://BUCKET/PREFIX"
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=_age,
        default="30d",
        help="in days or hours, such as 30d (if left out), 12h, or 0d for everything",
    )
    parser.add_argument("--delete", action="store_true", help="remove what is listed")
    parser.add_argument(
        "--keep",
        metavar="PATH",
        nargs="+",
        action="extend",
        default=[],
        help="further lock files, or directories of other checkouts: what they name is kept too",
    )
    parser.add_argument(
        "--without-state",
        action="store_true",
        help="go on if pulumi cannot say what all deployed stacks hold: for the others, locks and stack files count "
        "alone",
    )


def run(args: argparse.Namespace) -> int:
    """0: listed, or removed; 1: refused, or something could not be removed.

    Raises UserError for a stack or a path to keep that there is not.
    """
    directory = stack_directory()
    config = stack_config(directory, args.stack, PROJECT) if args.stack is not None else {}
    places = [_Place(directory), *map(_kept_place, args.keep)]
    try:
        return _collect(args.store or _store_of(config, args.stack), places, args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


@dataclass(frozen=True)
class _Place:
    """Where locks and stack files lie; `lock` is the name of the one that counts, None for all."""

    directory: Path
    lock: str | None = None


@dataclass
class _References:
    """The digests that something names, what was asked for them, and what could not be."""

    digests: set[str] = field(default_factory=set)
    locks: int = 0
    stack_files: int = 0
    deployed: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Files that may name any digest, each with what is wrong with it."""
    stacks_of_stores: list[str] = field(default_factory=list)
    """Stacks of stack files of this checkout that name a store."""
    no_state: str | None = None
    """Why nobody can say what deployed stacks hold."""

    def __str__(self) -> str:
        asked = ((self.locks, "lock"), (self.stack_files, "stack file"), (self.deployed, "deployed stack"))
        return ", ".join(counted(count, noun) for count, noun in asked)


def _collect(url: StoreUrl, places: Sequence[_Place], args: argparse.Namespace) -> int:
    references = _asked(places)
    if args.delete:
        _refuse_if_in_doubt(references, args.without_state)
    for warning in (*references.unreadable, *filter(None, [references.no_state])):
        print(f"warning: {warning}", file=sys.stderr)
    now = datetime.now(timezone.utc)
    store = opened(url)
    bundles = list(store.stored())
    found = [each for each in bundles if each.digest not in references.digests]
    old = sorted((each for each in found if now - each.modified >= args.older_than), key=lambda each: each.modified)
    unfinished = [each for each in store.unfinished() if now - each.started >= args.older_than]
    young = len(found) - len(old)
    print(
        f"{url.place}: {_sum(bundles)}; {len(bundles) - len(found)} of them referred to ({references})"
        + (f", {counted(young, 'other')} younger than {shown_age(args.older_than)}" if young else "")
    )
    for bundle in old:
        print(f"  {bundle.digest}  {shown_size(bundle.size)}  {shown_age(now - bundle.modified)}")
    for upload in unfinished:
        print(f"  unfinished upload of {upload.digest}  {shown_age(now - upload.started)}")
    if not old and not unfinished:
        print("nothing to remove")
        return 0
    if not args.delete:
        doubtful = references.unreadable or (references.no_state and not args.without_state)
        refusal = ", once nothing is warned of any more" if doubtful else ""
        print(f"--delete removes {_sum(old, len(unfinished))}{refusal}")
        return 0
    # What nothing referred to a moment ago may have been locked and pushed, or deployed, meanwhile.
    references = _asked(places)
    _refuse_if_in_doubt(references, args.without_state)
    for bundle in old:
        if bundle.digest in references.digests:
            print(f"kept, since it is referred to by now: {bundle.digest}")
    return _remove(store, [each for each in old if each.digest not in references.digests], unfinished)


def _asked(places: Sequence[_Place]) -> _References:
    references = _References()
    # Files last, since what becomes of them while pulumi thinks is no state's yet.
    known = _ask_pulumi(references)
    _ask_files(places, references)
    unknown = sorted(set(references.stacks_of_stores).difference(known))
    if unknown and references.no_state is None:
        # They may be deployed, with their state elsewhere.
        references.no_state = (
            "pulumi does not know, where it is logged in, all stacks whose files here name a store: not "
            + listed([printable(stack) for stack in unknown])
        )
    return references


def _remove(store: BundleStore, bundles: Sequence[Stored], unfinished: Sequence[Unfinished]) -> int:
    faults = store.remove([each.digest for each in bundles])
    stay = set(faults)
    sentences = list(faults.values())
    aborted = 0
    for upload in unfinished:
        try:
            store.abort(upload)
            aborted += 1
        except UserError as error:
            sentences.append(str(error))
    print(f"removed {_sum([each for each in bundles if each.digest not in stay], aborted)}")
    for sentence in dict.fromkeys(sentences):
        print(sentence, file=sys.stderr)
    return 1 if sentences else 0


def _refuse_if_in_doubt(references: _References, without_state: bool) -> None:
    if references.unreadable:
        raise UserError(
            "nothing was removed, since what cannot be read may name any bundle: " + "; ".join(references.unreadable)
        )
    if references.no_state and not without_state:
        raise UserError(
            f"nothing was removed, since {references.no_state}; mend that (`pulumi login`?), or pass "
            "--without-state if no deployed stack needs more than the locks and stack files name"
        )


def _sum(bundles: Sequence[Stored], unfinished: int = 0) -> str:
    size = shown_size(sum(each.size for each in bundles))
    more = f" and {counted(unfinished, 'unfinished upload')}" if unfinished else ""
    return f"{counted(len(bundles), 'bundle')} ({size}){more}"


def _age(text: str) -> timedelta:
    match = AGE.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is no age: give days or hours, such as 30d or 12h")
    return timedelta(days=int(match["count"])) if match["unit"] == "d" else timedelta(hours=int(match["count"]))


def _url(text: str) -> StoreUrl:
    try:
        return parse_store_url(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _store_of(config: RawConfig, stack: str) -> StoreUrl:
    text = config.get("store")
    if not text:
        raise no_store(stack)
    try:
        return parse_store_url(str(text))
    except UserError as error:
        raise UserError(f"stacks/Pulumi.{stack}.yaml: store: {error}") from None


# --- what the files say ---------------------------------------------------------------------------------------------


def _kept_place(text: str) -> _Place:
    """A lock, or a directory that has some: a checkout, or the stack files' own. A slip must not protect nothing."""
    path = Path(text).absolute()
    if path.name.endswith(LOCK_SUFFIX) and path.is_file():
        return _Place(path.parent, path.name)
    if path.is_dir():
        place = _Place(stack_directory(path) if (path / "Pulumi.yaml").is_file() else path)
        if any(_is_lock(name) or _is_stack_file(place.directory, name) for name in _names(place.directory)):
            return place
    raise UserError(
        f"--keep {shown_path(Path(text))}: neither a lock (NAME{LOCK_SUFFIX}) nor a directory that holds locks or "
        "stack files"
    )


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise UserError(f"{shown_path(directory)}: cannot be read ({os_reason(error)})") from None


def _is_stack_file(directory: Path, name: str) -> bool:
    if not name.startswith("Pulumi.") or not name.endswith(".yaml") or name == "Pulumi.yaml":
        return False
    # The lock of a stack `Pulumi.x` is named as the stack file of one `x.lock` is, and what Pulumi Deployments is told
    # of `x` as that of `x.deploy`.
    other = "models" if _is_lock(name) else "settings" if name.endswith(".deploy.yaml") else None
    return other is None or not holds_alone(directory, name, other)


def _is_lock(name: str) -> bool:
    return name.endswith(LOCK_SUFFIX)


def _ask_files(places: Iterable[_Place], references: _References) -> None:
    adapters: list[tuple[str, Path]] = []
    here, *_ = places
    for place in places:
        for name in [place.lock] if place.lock else _names(place.directory):
            try:
                if _is_stack_file(place.directory, name):
                    settings = _settings_of(place.directory, name)
                    adapters += _adapters_of(settings, name)
                    references.stack_files += 1
                    if place is here and settings.store and name not in NEVER_DEPLOYED:
                        references.stacks_of_stores.append(_stack_of(name))
                elif _is_lock(name):
                    entries = read_lock(place.directory, name.removesuffix(LOCK_SUFFIX))
                    if entries is None:
                        raise UserError(f"{place.directory.name}/{printable(name)}: vanished while it was to be read")
                    references.digests.update(entry.digest for entry in entries.values())
                    references.locks += 1
            except LockError as error:
                references.unreadable += error.faults
            except UserError as error:
                references.unreadable.append(str(error))
    directories = [directory for _, directory in adapters]
    for (place_of, directory), answer in zip(adapters, DigestCache().describe_all(directories), strict=True):
        if not isinstance(answer, UserError):
            references.digests.add(answer.digest)
        elif not why_absent(directory):
            references.unreadable.append(f"{place_of}: {answer}")


def _stack_of(name: str) -> str:
    return name.removeprefix("Pulumi.").removesuffix(".yaml")


def _settings_of(directory: Path, name: str) -> Settings:
    """What a stack file says. Raises UserError where it may say more of models than is understood.

    Pods may be at fault: a stack may be written before its machines are known.
    """
    config = stack_config(directory, _stack_of(name), PROJECT)
    settings, faults = parse_models(config)
    hiding = {*unknown_key_faults(config), *(fault for fault in faults if fault.startswith("models"))}
    if not config:
        hiding.add("config: is missing or empty")
    elif not settings.store and config.get("store"):
        hiding.update(fault for fault in faults if fault.startswith("store"))
    if hiding:
        raise UserError("; ".join(f"{directory.name}/{printable(name)}: {fault}" for fault in sorted(hiding)))
    return settings.model_copy(update={"directory": directory})


def _adapters_of(settings: Settings, name: str) -> Iterator[tuple[str, Path]]:
    """Where the adapters of a stack file are to be, each with the model's place in the file."""
    place = f"{settings.directory.name}/{printable(name)}"
    for model in settings.models:
        if model.adapter:
            yield f"{place}: {settings.places[model.id]}.adapter", settings.adapter_directory(model)


# --- what deployed stacks hold --------------------------------------------------------------------------------------


def _ask_pulumi(references: _References) -> Sequence[str]:
    """Add every digest in the state of every stack of this project, and return the stacks."""
    try:
        stacks = [str(stack["name"]) for stack in json.loads(ask_pulumi("stack", "ls", "--json", to_ask_for=DEPLOYED))]
        if not stacks:
            # What a fresh `pulumi login` to the wrong place looks like, too.
            raise UserError("pulumi knows no stack of this project where it is logged in")
        with ThreadPoolExecutor(PULUMIS_AT_ONCE) as pool:
            for state in pool.map(_exported, stacks):
                # Wherever it stands: an adapter's resource, one that was being made, or a command that names it.
                references.digests.update(DIGEST.findall(state))
        references.deployed = len(stacks)
        # Those of an organisation are told as `owner/name`.
        return [stack.rpartition("/")[2] for stack in stacks]
    except UserError as error:
        references.no_state = str(error)
    except (ValueError, TypeError, KeyError):
        references.no_state = "pulumi's list of stacks cannot be made sense of"
    return []


def _exported(stack: str) -> str:
    text = ask_pulumi("stack", "export", "--stack", stack, to_ask_for=DEPLOYED)
    if "deployment" not in json.loads(text):
        raise UserError(f"the state of stack {printable(stack)} cannot be made sense of")
    return text
