"""Where a bundle's bytes come from when something lacks them: an adapter's directory here, or the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from components.core.adapter import read_adapter
from components.core.bundle import bundle_members, stream_bundle
from components.core.digest_cache import DigestCache, look
from components.core.errors import UserError, printable
from components.core.listing import listed
from components.core.lock import why_absent
from components.core.meter import Meter, Say

if TYPE_CHECKING:
    from components.settings import Settings
    from components.store import BundleStore
    from components.store_url import StoreUrl

# Pulumi asks for several resources at a time, and more than one model may have the same bytes.
_TURNS: dict[str, Lock] = {}


class Supply:
    """The bundles that were asked for, and what of them is on this machine.

    `wanted` maps models to digests; a digest is here if the directory of any of its models is. `say` is told how far an
    upload to the store is.
    """

    def __init__(self, wanted: Mapping[str, str], settings: Settings, say: Say | None = None) -> None:
        self._store, self._say = settings.store, say
        self._models = {digest: model for model, digest in sorted(wanted.items(), reverse=True)}
        self._here: dict[str, Path] = {}
        self._absent: dict[str, str] = {}
        self._digests = DigestCache(say=say)
        self._seen: dict[str, str] = {}
        for model in settings.models:
            if model.id in wanted and wanted[model.id] not in self._here:
                directory, digest = settings.adapter_directory(model), wanted[model.id]
                if why_absent(directory):
                    self._absent[digest] = f"{printable(model.id)} ({digest}) at {printable(model.adapter)}"
                else:
                    self._here[digest] = directory

    def tail(self, digest: str, offset: int) -> Iterator[memoryview]:
        """The bundle's bytes from `offset` on, for a pod, which hashes what it gets.

        Raises:
            UserError: the adapter is another one by now.
        """
        directory = self._here[digest]
        if look(directory).fingerprint != self._seen.get(digest):
            self.demand_unchanged([digest])
        for chunk in stream_bundle(bundle_members(read_adapter(directory)), start=offset):
            yield memoryview(chunk)

    def demand_unchanged(self, digests: Iterable[str]) -> None:
        """Raises UserError where an adapter is another one by now. What is not remembered of them is hashed."""
        here = {digest: self._here[digest] for digest in digests}
        seen = {digest: look(directory).fingerprint for digest, directory in here.items()}
        for (digest, directory), facts in zip(
            here.items(), self._digests.describe_all(list(here.values())), strict=True
        ):
            if isinstance(facts, UserError):
                raise facts
            if facts.digest != digest:
                raise _changed(directory, digest)
        self._seen |= seen

    def whole(self, digest: str) -> Iterator[memoryview]:
        """All of the bundle's bytes, for a store, which is told of their digest and believes it.

        Raises:
            UserError: after the last of them, where they were others.
        """
        directory, hashed = self._here[digest], hashlib.sha256()
        for chunk in stream_bundle(bundle_members(read_adapter(directory))):
            hashed.update(chunk)
            yield memoryview(chunk)
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise _changed(directory, digest)

    def _metered(self, digest: str, meter: Meter) -> Iterator[memoryview]:
        return meter.through(f"{self._models[digest]} to the store", self.whole(digest))

    def demand(self, digests: Iterable[str]) -> None:
        """Raises UserError, with all of them, if some are nowhere on this machine: before anything is sent."""
        nowhere = sorted(self._absent[digest] for digest in digests if digest not in self._here)
        if nowhere:
            many = len(nowhere) > 1
            raise UserError(
                f"the pod lacks what is not on this machine either: {listed(nowhere)}; put the adapter"
                f"{'s' if many else ''} there, or run `pulumi up` once from a machine that has "
                f"{'them' if many else 'it'}"
            )

    def keep(self, sizes: Mapping[str, int]) -> list[str]:
        """See to it that the store has these bundles; return those that it has not and this machine cannot give it."""
        assert self._store is not None, "who asks for this has a store"
        store, nowhere = opened(self._store), []
        for digest, size in sorted(sizes.items()):
            if digest in self._here:
                with _TURNS.setdefault(digest, Lock()):
                    meter = Meter("uploading", 1, size, self._say)
                    store.ensure(digest, size, partial(self._metered, digest, meter))
                    meter.end("uploaded")
            elif store.size(digest) is None:
                nowhere.append(digest)
        return nowhere

    def demand_stored(self, sizes: Mapping[str, int]) -> None:
        """Like `keep`. Raises UserError, with all of them, for what is nowhere: before any pod is told."""
        nowhere = sorted(self._absent[digest] for digest in self.keep(sizes))
        if nowhere:
            assert self._store is not None, "who asks for this has a store"
            many = len(nowhere) > 1
            raise UserError(
                f"the pod lacks what neither {self._store.place} nor this machine has: {listed(nowhere)}; run "
                f"`lora push` where {'they are' if many else 'it is'}, or put the adapter{'s' if many else ''} there"
            )

    def offers(self, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
        """What podctl's `fetch` is told of these bundles. The URLs in it are secrets."""
        assert self._store is not None, "who asks for this has a store"
        url, store = self._store, opened(self._store)
        return [
            {"digest": digest, "size": size, "url": store.presigned(digest), "name": url.name(digest)}
            for digest, size in sorted(sizes.items())
        ]


@cache
def opened(url: StoreUrl) -> BundleStore:
    """The store at `url`, with one client for all that this process asks of it."""
    # Here, since boto3 takes a fifth of a second to load and a preview asks no store.
    from components.store import BundleStore

    return BundleStore(url)


def _changed(directory: Path, digest: str) -> UserError:
    return UserError(
        f"{printable(directory)} changed since this run looked at it (it was {digest}): is a training still "
        "writing there? run it again when it is done"
    )
