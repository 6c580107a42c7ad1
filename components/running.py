"""What runs, as the stack's output `engines` keeps it: the only memory that a later preview can compare with.

A program cannot see its own state, but the engine answers a program that asks for a stack's last outputs (the function
`pulumi:pulumi:readStackOutputs`, pkg/resource/deploy/builtins.go in Pulumi 3.274; StackReference is built on it), or
which resources it has (`readStackResourceOutputs`, with their outputs: asked only while pods are switched off).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi

from components.core.naming import unit_name
from components.engine import PlannedEngine, VllmEngine
from components.pods.credentials import is_sandboxed
from components.pods.gpu_pod import GpuPod
from components.preview import Foreseen, is_off

_ON_PODS = ("command:remote:Command", "pulumi-python:dynamic/lora-pods:BundleUpload")
_REACHED = "pulumi-python:dynamic/lora-pods:ReachedPod"


@dataclass(frozen=True)
class Serving:
    """One pod and its engine: what is planned, and the resources that bring it about."""

    base: str
    planned: PlannedEngine
    adapters: Mapping[str, str]
    """The digest of each model with an adapter."""
    aliases: Sequence[str]
    on: GpuPod
    engine: VllmEngine
    instance_type: str | None = None
    """Of a pod on EC2."""

    @property
    def switched_off(self) -> bool:
        return self.on.switched_off

    async def record(self) -> dict[str, Any] | None:
        """What `engines` says of it once it runs; None as long as it does not, or not with what is planned."""
        if not await self.engine.activated.is_known():
            return None
        activated = await self.engine.activated.future()
        # Where a run is limited to some resources (--target), the activation may be that of an earlier plan.
        if not activated or activated["unit"]["text"] != self.planned.unit:
            return None
        return {
            "endpoint": await pulumi.Output.from_input(self.on.machine.endpoint).future(),
            # Of a machine that has its address from us, nobody would know it otherwise.
            **({"ssh": await self._login().future()} if self.instance_type else {}),
            "unit": unit_name(self.planned.key),
            "unitSha256": _sha256(self.planned.unit),
            "secretsRevision": activated["secretsRevision"],
            "models": {self.base: None, **dict.fromkeys(self.aliases), **self.adapters},
            "flags": {flag.name: flag.value for flag in self.planned.plan.flags},
        }

    def _login(self) -> pulumi.Output[str]:
        connection = self.on.machine.connection
        return pulumi.Output.format("{0}@{1}", connection.user, connection.address)

    async def kept(self, record: Any) -> dict[str, Any] | None:
        """What `engines` says of it while it is switched off: the same as before, and that it is off."""
        # Not before it is off; an update that fails at that records nothing.
        await pulumi.Output.from_input(self.on.machine.identity).future()
        if not isinstance(record, Mapping):
            return None
        activated = await self.engine.activated.future() or {}
        served = activated["ready"]["models"] if activated else {}
        # Pulumi hands a program its own outputs without what is null in them: the names of the base itself.
        names = dict.fromkeys(name for name, root in served.items() if root == self.base)
        models = record.get("models")
        return {**record, "models": {**names, **(models if isinstance(models, Mapping) else {})}, "running": False}

    async def foreseen(self) -> Foreseen:
        secrets = await self.engine.secrets.future() if await self.engine.secrets.is_known() else None
        return Foreseen(
            self.base,
            self.adapters,
            self.planned.plan.flags,
            _sha256(self.planned.unit),
            reached=await pulumi.Output.from_input(self.on.machine.identity).is_known(),
            prepared=self.on.prepared is not None and await self.on.prepared.stdout.is_known(),
            activated=await self.engine.activated.is_known(),
            secrets_revision=secrets["revision"] if secrets else None,
            machine=_described(self.instance_type),
            switched_off=self.switched_off,
        )


async def running(all_of_it: Sequence[Serving]) -> Any:
    """The output `engines`. In a preview it is unknown as soon as one engine changes: Pulumi would print it in full.

    An update that did not get as far as an engine leaves what was said of it. Of a pod that is switched off, what is
    said is kept, and that it is off.
    """
    records = {serving.base: await serving.record() for serving in all_of_it if not serving.switched_off}
    off = [serving for serving in all_of_it if serving.switched_off]
    if not off and None not in records.values():
        return records
    if pulumi.runtime.is_dry_run() and None in records.values():
        return pulumi.UNKNOWN
    before = await last_outputs()
    if before is None:
        pulumi.log.warn(
            "The stack's last outputs cannot be read, so that `engines` now leaves out the pods that this update did "
            "not finish or that are switched off; run pulumi up again."
        )
        before = {}
    kept = {base: record or before.get(base) for base, record in records.items()}
    kept |= {serving.base: await serving.kept(before.get(serving.base)) for serving in off}
    if pulumi.runtime.is_dry_run() and any(kept[one.base] and not is_off(before[one.base]) for one in off):
        return pulumi.UNKNOWN
    return {base: record for base, record in kept.items() if record}


@dataclass(frozen=True)
class Left:
    """What the last update left on pods."""

    names: frozenset[str]
    """Of the resources."""
    sandboxed: frozenset[str]
    """The bases that a sandbox serves."""


def left_on_pods() -> Left | None:
    """None where the backend does not tell.

    `engines` does not say that of a pod that never came as far as an engine. It is asked at once, since a program
    cannot declare a resource or leave it out once it has ended.
    """
    try:
        answer = pulumi.runtime.invoke("pulumi:pulumi:readStackResourceOutputs", {"stackName": _this_stack()})
        resources = dict((answer.value or {})["outputs"])
    except Exception as error:
        pulumi.log.debug(f"the resources of {_this_stack()} cannot be read: {error}")
        return None
    names, sandboxed = set(), set()
    for urn, resource in resources.items():
        kind, name = urn.split("::", 3)[2:]
        if kind.split("$")[-1] in _ON_PODS:
            names.add(name)
        if kind.split("$")[-1] == _REACHED and is_sandboxed(_credential(resource)):
            sandboxed.add(name.removesuffix("-reach"))
    return Left(frozenset(names), frozenset(sandboxed))


def _credential(reached: Any) -> str:
    """Of a ReachedPod, as the state has it."""
    try:
        return str(reached["outputs"]["connection"]["credential"])
    except (KeyError, TypeError):
        return ""


async def last_outputs() -> Mapping[str, Any] | None:
    """`engines` as the last update left it; empty before the first one, None where the backend does not tell."""
    stack = _this_stack()
    try:
        answer = await pulumi.runtime.invoke_async("pulumi:pulumi:readStackOutputs", {"name": stack})
        engines = (answer["outputs"] or {}).get("engines", {})
    except Exception as error:
        # A preview without its comparison is better than none; the SDK has no narrower type for what may go wrong.
        pulumi.log.debug(f"the outputs of {stack} cannot be read: {error}")
        return None
    return engines if isinstance(engines, Mapping) else {}


def _this_stack() -> str:
    return f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"


def _described(instance_type: str | None) -> str:
    if instance_type is None:
        return ""
    from components.core.ec2_gpus import described

    return described(instance_type)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
