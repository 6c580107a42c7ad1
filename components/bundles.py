"""Adapters as resources: what each one is, its way to a pod, and its place there.

The module paths and class names of the providers are in every stack's state: see docs/naming.md before moving one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from components.core.adapter import read_adapter
from components.core.bundle import bundle_members, stream_bundle
from components.core.digest_cache import BundleFacts
from components.core.errors import UserError, printable
from components.core.listing import listed
from components.core.lock import why_absent
from components.pods.contract import Machine
from components.pods.credentials import private_key_text
from components.pods.gpu_pod import GpuPod
from components.provider import Provider
from components.remote import pod_command, podctl_line, podctl_sha256
from components.settings import Settings


class AdapterBundleProvider(Provider):
    """A bundle is its digest: it is made anew when, and only when, the digest changes. It touches no pod."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(props["digest"], props)

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changed = _olds.get("digest") != _news.get("digest")
        return DiffResult(changes=changed, replaces=["digest"] if changed else [], delete_before_replace=False)


class AdapterBundle(Resource, module="lora-pods", name="AdapterBundle"):
    """One model's adapter. Its id is `sha256:<hex>`, the digest of the adapter's deterministic tar."""

    digest: pulumi.Output[str]

    def __init__(self, name: str, facts: BundleFacts, opts: pulumi.ResourceOptions) -> None:
        # No path of this machine: the same bytes under another name elsewhere are no change.
        props = {"digest": facts.digest, "size": facts.size, "rank": facts.rank}
        super().__init__(AdapterBundleProvider(), name, props, opts)


class BundleUploadProvider(Provider):
    """Sends a pod what it lacks: it is asked once, and only what it names is read here, let alone sent."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        asyncio.run(_send(props, self.settings()))
        return CreateResult(props["engine"], props)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        asyncio.run(_send(_news, self.settings()))
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

    placed: pulumi.Resource

    def __init__(
        self,
        base: str,
        engine: str,
        stack: str,
        pod: GpuPod,
        bundles: Mapping[str, BundleFacts],
        opts: pulumi.ResourceOptions,
    ) -> None:
        super().__init__("lora-pods:index:PlacedBundles", base, {}, opts)
        machine = pod.machine
        upload = BundleUpload(f"{base}-upload", engine, machine, bundles, pod.options(self, after=(pod.prepared,)))
        self.placed = pod_command(
            f"{base}-place",
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
        )
        self.register_outputs({})


async def _send(props: Mapping[str, Any], settings: Settings) -> None:
    # Here, since asyncssh takes a third of a second to load and a preview sends nothing.
    from components.ssh import Address, open_session

    wanted: Mapping[str, str] = props["bundles"]
    sizes = {digest: int(size) for digest, size in props["sizes"].items()}
    described = props["connection"]
    address = Address.of(described)

    def line(verb: str) -> str:
        return podctl_line(address.user, verb)

    async with open_session(address, private_key_text(described["credential"], settings)) as session:
        answer = await session.call(line("missing"), {"bundles": sizes})
        missing: dict[str, int] = answer["missing"]
        if not missing:
            return
        sources = _sources({model: digest for model, digest in wanted.items() if digest in missing}, settings)
        head = {"bundles": [{"digest": d, "size": sizes[d], "offset": missing[d]} for d in sorted(missing)]}
        await session.stream(
            line("receive-all"),
            chain(
                [json.dumps(head).encode() + b"\n"],
                *(_tail(sources[digest], digest, missing[digest]) for digest in sorted(missing)),
            ),
        )


def _sources(wanted: Mapping[str, str], settings: Settings) -> dict[str, Path]:
    """Where each digest's bytes are on this machine. `wanted` maps models to the digests that must be sent.

    Raises UserError, with all of them, if some are nowhere: before anything is sent.
    """
    sources: dict[str, Path] = {}
    absent: dict[str, str] = {}
    for model in settings.models:
        if model.id in wanted and wanted[model.id] not in sources:
            directory, digest = settings.adapter_directory(model), wanted[model.id]
            if why_absent(directory):
                absent[digest] = f"{printable(model.id)} ({digest}) at {printable(model.adapter)}"
            else:
                sources[digest] = directory
    nowhere = sorted(text for digest, text in absent.items() if digest not in sources)
    if nowhere:
        raise UserError(
            f"the pod lacks what is not on this machine either: {listed(nowhere)}; put the adapter"
            f"{'s' if len(nowhere) > 1 else ''} there, or run `pulumi up` once from a machine that has "
            f"{'them' if len(nowhere) > 1 else 'it'}"
        )
    return sources


def _tail(directory: Path, digest: str, offset: int) -> Iterator[memoryview]:
    """The bundle's bytes from `offset` on; all of it is read, so that what is sent is what was promised."""
    hashed, position = hashlib.sha256(), 0
    for chunk in stream_bundle(bundle_members(read_adapter(directory))):
        hashed.update(chunk)
        view = memoryview(chunk)
        if position + len(view) > offset:
            yield view[max(0, offset - position) :]
        position += len(view)
    if f"sha256:{hashed.hexdigest()}" != digest:
        raise UserError(
            f"{printable(directory)} changed since this run looked at it (it was {digest}): is a training still "
            "writing there? run pulumi up again when it is done"
        )
