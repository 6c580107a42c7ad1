"""`lora push -s STACK`: sees to it that the stack's store has every adapter. No pulumi, no pod."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.checked import verdict_on
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError, printable
from components.core.listing import counted, listed
from components.core.lock import short_digest
from components.core.sizes import shown_size
from components.locked import Looked, look
from components.settings import PROJECT, RawConfig, Settings, SettingsError, parse_models
from components.stack_files import LockError, lock_place, read_lock, stack_config, stack_directory
from components.supply import Supply, opened

if TYPE_CHECKING:
    from components.store import BundleStore

# Answers of some 20 ms each.
QUESTIONS_AT_ONCE = 8
# Two keep two cores hashing while two wait for the network; each holds some parts of an upload in memory.
UPLOADS_AT_ONCE = 4


class _Stopped(Exception):
    """Raised in the midst of an upload, so that it is undone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send the adapters of a stack to its store, each once and only if it is not there, so that `pulumi up` needs "
        "no adapter on the machine that runs it and the pods fetch them from there. They are checked as "
        "`pulumi preview` checks them, and nothing is sent if there are errors. Adapters that are not on this machine "
        "are looked for in the store, by the digest that the lock has. Deploys nothing."
    )
    parser.add_argument("-s", "--stack", required=True, help="the stack's name: that of stacks/Pulumi.STACK.yaml")


def run(args: argparse.Namespace) -> int:
    """0: the store has every adapter; 1: it lacks some, or something is at fault.

    Raises UserError where there is no such stack here.
    """
    directory = stack_directory()
    config = stack_config(directory, args.stack, PROJECT)
    try:
        with _ended_as_by_ctrl_c():
            return _push(directory, args.stack, config)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, with which a CI system ends a job, undoes what is half sent, too."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def no_store(stack: str) -> UserError:
    """What to raise where a stack file names no store."""
    return UserError(
        f"stacks/Pulumi.{stack}.yaml: names no store; set it: "
        f"`pulumi config set store s3://BUCKET/PREFIX --stack {stack}`"
    )


def _push(directory: Path, stack: str, config: RawConfig) -> int:
    settings, faults = parse_models(config)
    if faults:
        raise SettingsError(faults)
    if settings.store is None:
        raise no_store(stack)
    cache = DigestCache()
    found = look(settings, stack, cache)
    verdict = verdict_on(found.present, settings, cache)
    if verdict.faults:
        raise SettingsError(verdict.faults, verdict.warnings)
    for warning in (*verdict.warnings, *_lock_warnings(found, settings, stack)):
        print(f"warning: {warning}", file=sys.stderr)
    models = [model for model in settings.models if model.adapter]
    if not models:
        print(f"{settings.store.place}: the stack has no adapters; nothing to send")
        return 0
    push = _Push(found, settings, opened(settings.store))
    for line in push.lines():
        print(line, flush=True)
    unlocked = [model.id for model in models if model.id not in found.bundles]
    if push.nowhere or unlocked:
        push.faults.append(_absence(push.nowhere, unlocked, settings, stack))
    print(push.summary(len(models)))
    for fault in push.faults:
        print(fault, file=sys.stderr)
    return 1 if push.faults else 0


class _Push:
    """One run's questions, uploads and what came of them; `lines` does it."""

    def __init__(self, found: Looked, settings: Settings, store: BundleStore) -> None:
        assert settings.store is not None, "who pushes has a store"
        self.nowhere: list[str] = []
        """Models whose bundle is neither on this machine nor in the store."""
        self.faults: list[str] = []
        self._place, self._store = settings.store.place, store
        self._bundles = dict(sorted(found.bundles.items()))
        here = {one.model.id: self._bundles[one.model.id].digest for one in found.present}
        self._here = set(here.values())
        # Of the same bytes here and, by the lock, elsewhere, those that were looked at count.
        looked_at = {self._bundles[model].digest: self._bundles[model] for model in here}
        self._unique = {facts.digest: looked_at.get(facts.digest, facts) for facts in self._bundles.values()}
        self._supply = Supply(here, settings)
        self._there = self._sent = self._sent_bytes = 0
        self._stop = threading.Event()

    def lines(self) -> Iterator[str]:
        """A line for each adapter, in order, once it is known what became of it."""
        unique = self._unique
        # All are asked for before the first is sent, and one before the others: a store that cannot be used says so at
        # once, and once.
        stored = {digest: self._store.size(digest) for digest in islice(unique, 1)}
        rest = [digest for digest in unique if digest not in stored]
        with ThreadPoolExecutor(QUESTIONS_AT_ONCE) as pool:
            stored.update(zip(rest, pool.map(self._store.size, rest), strict=True))
        lacking = [facts for digest, facts in unique.items() if stored[digest] is None and digest in self._here]
        if lacking:
            size = shown_size(sum(facts.size for facts in lacking))
            yield f"{self._place}: lacks {counted(len(lacking), 'adapter')} ({size})"
        yield from self._seen_to(stored, unique)

    def summary(self, adapters: int) -> str:
        """What the store has after `lines`, of this many adapters."""
        sent = f" ({self._sent} sent, {shown_size(self._sent_bytes)})" if self._sent else "; nothing was sent"
        return f"{self._place}: has {self._there} of {counted(adapters, 'adapter')}{sent}"

    def _seen_to(self, stored: Mapping[str, int | None], unique: Mapping[str, BundleFacts]) -> Iterator[str]:
        uploads: dict[str, Future[bool]] = {}
        pool = ThreadPoolExecutor(UPLOADS_AT_ONCE)
        try:
            for digest, facts in unique.items():
                if stored[digest] != facts.size and (digest in self._here or stored[digest] is not None):
                    uploads[digest] = pool.submit(self._store.ensure, digest, facts.size, self._chunks(digest))
            first: dict[str, str] = {}
            for model, facts in self._bundles.items():
                same_as = first.setdefault(facts.digest, model)
                outcome = self._outcome(model, facts, uploads.get(facts.digest), stored[facts.digest], same_as)
                yield f"  {printable(model)}  {short_digest(facts.digest)}  {outcome}"
        except BaseException as error:
            self._stop.set()
            if isinstance(error, KeyboardInterrupt) and uploads:
                print("interrupted; undoing what is half sent", file=sys.stderr, flush=True)
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()

    def _outcome(
        self, model: str, facts: BundleFacts, upload: Future[bool] | None, stored: int | None, same_as: str
    ) -> str:
        sent = False
        try:
            sent = upload.result() if upload else False
        except UserError as error:
            if str(error) not in self.faults:
                self.faults.append(str(error))
            return "not sent" if stored is None else "not as it should be"
        if not upload and stored is None:
            self.nowhere.append(model)
            return "missing"
        self._there += 1
        if same_as != model:
            return f"the same as {printable(same_as)}"
        if sent:
            self._sent += 1
            self._sent_bytes += facts.size
            return f"sent ({shown_size(facts.size)})"
        return "already there" if facts.digest in self._here else "already there; not on this machine"

    def _chunks(self, digest: str) -> Callable[[], Iterator[memoryview]] | None:
        return (lambda: self._until_stopped(digest)) if digest in self._here else None

    def _until_stopped(self, digest: str) -> Iterator[memoryview]:
        for chunk in self._supply.whole(digest):
            if self._stop.is_set():
                raise _Stopped
            yield chunk


def _lock_warnings(found: Looked, settings: Settings, stack: str) -> Iterator[str]:
    """What keeps a machine without the adapters from finding in the store what is pushed."""
    needed = "a machine without the adapters knows them by it alone"
    try:
        if read_lock(settings.directory, stack) is None and found.bundles:
            place = lock_place(settings.directory, stack)
            yield f"there is no {place}; write it with `lora lock -s {stack}` and commit it: {needed}"
    except LockError as error:
        yield from (f"{fault}; {needed}" for fault in error.faults)
    yield from (f"{warning} and commit it: {needed}" for warning in found.warnings)


def _absence(nowhere: Sequence[str], unlocked: Sequence[str], settings: Settings, stack: str) -> str:
    """The one sentence on all that is neither here nor in the store, or not known to be there."""
    assert settings.store is not None, "who pushes has a store"
    at = {model.id: f"{printable(model.id)} at {printable(model.adapter)}" for model in settings.models}
    unknown = f" ({lock_place(settings.directory, stack)} has no entry that fits)"
    adapters = [*(at[model] for model in nowhere), *(at[model] + unknown for model in unlocked)]
    return (
        f"neither {settings.store.place} nor this machine has {listed(adapters)}; run "
        f"{f'`lora lock -s {stack}` and ' if unlocked else ''}`lora push -s {stack}` where "
        f"{'it is' if len(adapters) == 1 else 'they are'}{', and commit the lock' if unlocked else ''}"
    )
