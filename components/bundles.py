"""Adapters as resources: what each one is, its way to a pod, and its place there.

The module paths and class names of the providers are in every stack's state: see docs/naming.md before moving one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from components.console import provider_says
from components.core.errors import UserError
from components.core.meter import Meter, Say, paced
from components.pods.credentials import private_key_text
from components.provider import Provider, run
from components.remote import pod_command, podctl_line, podctl_sha256
from components.supply import Supply, opened

if TYPE_CHECKING:
    from components.core.digest_cache import BundleFacts
    from components.pods.contract import Machine
    from components.pods.gpu_pod import GpuPod
    from components.settings import Settings
    from components.store_url import StoreUrl


class AdapterBundleProvider(Provider):
    """A bundle is its digest: it is made anew when, and only when, the digest changes. It touches no pod.

    Where the stack has a store, the bundle is there once the resource is; one that neither this machine nor the store
    has may still be on every pod, and is looked for again by the next run. A delete leaves it in the store: other
    stacks and pods may mean the same bytes, and `lora gc-store` knows who does.
    """

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(props["digest"], self._kept(props))

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(self._kept(_news))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        replaces = ["digest"] if _olds.get("digest") != _news.get("digest") else []
        moved = _olds.get("store") != _news.get("store")
        return DiffResult(changes=bool(replaces) or moved, replaces=replaces, delete_before_replace=False)

    def read(self, id_: str, props: dict[str, Any]) -> ReadResult:
        """A refresh looks whether the store has it still."""
        store = self.settings().store if props.get("store") else None
        if store and props["store"] == store.place:
            with suppress(UserError):  # a store that cannot be asked says nothing of what it has
                if opened(store).size(props["digest"]) is None:
                    return ReadResult(id_, {**props, "store": ""})
        return ReadResult(id_, props)

    def _kept(self, props: dict[str, Any]) -> dict[str, Any]:
        if not props.get("store"):
            return props
        wanted = {props["model"]: props["digest"]}
        nowhere = Supply(wanted, self.settings(), provider_says()).keep({props["digest"]: int(props["size"])})
        return {**props, "store": ""} if nowhere else props


class AdapterBundle(Resource, module="lora-pods", name="AdapterBundle"):
    """One model's adapter. Its id is `sha256:<hex>`, the digest of the adapter's deterministic tar.

    No output is declared: nobody asks for one, and the SDK reads a class's declarations anew for each of a thousand.
    """

    def __init__(self, name: str, facts: BundleFacts, store: StoreUrl | None, opts: pulumi.ResourceOptions) -> None:
        # No path of this machine: the same bytes under another name elsewhere are no change.
        props: dict[str, Any] = {"digest": facts.digest, "size": facts.size, "rank": facts.rank}
        if store:
            props |= {"model": name, "store": store.place}
        super().__init__(AdapterBundleProvider(), name, props, opts)


class BundleUploadProvider(Provider):
    """Gets a pod what it lacks: it is asked once, and only what it names is read here, let alone sent.

    It is sent over SSH, or fetched by the pod where the stack has a store.
    """

    def create(self, props: dict[str, Any]) -> CreateResult:
        run(_send(props, self.settings(), provider_says()))
        return CreateResult(props["engine"], props)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        run(_send(_news, self.settings(), provider_says()))
        return UpdateResult(_news)

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        compared = ("bundles", "connection", "identity", "podctl")
        return DiffResult(changes=any(_olds.get(key) != _news.get(key) for key in compared))

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """Nothing: what was unpacked goes with its references, what was half sent with the pod's clean-up."""


class BundleUpload(Resource, module="lora-pods", name="BundleUpload"):
    """One pod's bundles on their way: `bundles` maps each of its models to a digest."""

    def __init__(
        self, name: str, engine: str, machine: Machine, bundles: Mapping[str, BundleFacts], opts: pulumi.ResourceOptions
    ) -> None:
        props = {
            "engine": engine,
            "bundles": {model: facts.digest for model, facts in sorted(bundles.items())},
            "sizes": {facts.digest: facts.size for facts in bundles.values()},
            "connection": machine.connection.described(),
            "identity": machine.identity,
            "podctl": podctl_sha256(),
        }
        super().__init__(BundleUploadProvider(), name, props, opts)


class PlacedBundles(pulumi.ComponentResource):
    """The bundles of one pod, from the laptop to the blob store, each held by its model's reference."""

    placed: pulumi.Resource | None

    def __init__(
        self,
        base: str,
        engine: str,
        stack: str,
        pod: GpuPod,
        bundles: Mapping[str, BundleFacts],
        kept: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """`kept` are the bundles' own resources where they must be in the store before the pod fetches them."""
        super().__init__("lora-pods:index:PlacedBundles", base, {}, opts)
        machine = pod.machine
        upload = pod.put(
            f"{base}-upload",
            lambda name: BundleUpload(name, engine, machine, bundles, pod.options(self, after=(pod.prepared, *kept))),
        )
        self.placed = pod.put(
            f"{base}-place",
            lambda name: pod_command(
                name,
                machine.connection,
                "place",
                {
                    "stack": stack,
                    "base": base,
                    "identity": machine.identity,
                    "models": {model: facts.digest for model, facts in bundles.items()},
                },
                undo=("unplace", ["--stack", stack, "--base", base]),
                opts=pod.options(self, after=(upload,)),
            ),
        )
        self.register_outputs({})


async def _send(props: Mapping[str, Any], settings: Settings, say: Say | None) -> None:
    # Here, since asyncssh takes a third of a second to load and a preview sends nothing.
    from components.ssh import Address, open_session

    wanted: Mapping[str, str] = props["bundles"]
    sizes = {digest: int(size) for digest, size in props["sizes"].items()}
    described = props["connection"]
    address = Address.of(described)

    def line(verb: str) -> str:
        return podctl_line(address.user, verb)

    async with open_session(address, private_key_text(described["credential"], settings)) as session:
        answer = await session.call(line("missing"), {"engine": props["engine"], "bundles": sizes})
        missing: dict[str, int] = answer["missing"]
        if not missing:
            return
        sizes = {digest: sizes[digest] for digest in missing}
        supply = Supply({model: digest for model, digest in wanted.items() if digest in missing}, settings, say)
        if settings.store:
            # In a thread, so that the connection is kept alive meanwhile.
            await asyncio.to_thread(supply.demand_stored, sizes)
            await session.call(line("fetch"), {"bundles": supply.offers(sizes)}, paced(say))
            return
        # What arrived whole, and is not unpacked yet, needs nothing of this machine.
        here = [digest for digest in missing if missing[digest] < sizes[digest]]
        supply.demand(here)
        await asyncio.to_thread(supply.demand_unchanged, here)
        head = {"bundles": [{"digest": d, "size": sizes[d], "offset": missing[d]} for d in sorted(missing)]}
        meter = Meter("uploading", len(here), sum(sizes[digest] - missing[digest] for digest in here), say)
        models = {digest: model for model, digest in sorted(wanted.items(), reverse=True)}
        tails = (meter.through(models[digest], supply.tail(digest, missing[digest])) for digest in sorted(here))
        await session.stream(line("receive-all"), chain([json.dumps(head).encode() + b"\n"], *tails))
        meter.end("uploaded")
