"""The whole of a stack: what the adapters are, one pod per base, its bundles and its engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pulumi

from components.bundles import AdapterBundle, PlacedBundles
from components.core.errors import UserError, printable, printable_text
from components.core.listing import listed
from components.described import Described, served_by
from components.engine import VllmEngine
from components.pods.gpu_pod import GpuPod, pod_options, switched_off
from components.preview import cut, summary
from components.running import Serving, last_outputs, left_on_pods, running
from components.settings import Pod, Settings


class Deployment(pulumi.ComponentResource):
    """Everything a stack file asks for. `engines` is what the program exports: per base, what serves it and how."""

    engines: pulumi.Output[dict[str, Any]]

    def __init__(self, name: str, described: Described, stack: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lora-pods:index:Deployment", name, {}, opts)
        child = pulumi.ResourceOptions(parent=self)
        options = pod_options(described.settings, child)
        off = [pod.base for pod in described.settings.pods if switched_off(pod, described.settings)]
        left = left_on_pods() if off else None
        self._left = left.names if left else None
        tell(described)
        if left and (gone := left.sandboxed - {pod.base for pod in described.settings.pods}):
            _refuse_to_leave(gone, described.settings)
        tell_switched_off(described.settings, off, self._left)
        self._bundles = {
            model: AdapterBundle(model, facts, described.settings.store, child)
            for model, facts in sorted(described.bundles.items())
        }
        serving = [self._serve(pod, described, stack, options[pod.base], child) for pod in described.settings.pods]
        self.engines = pulumi.Output.from_input(running(serving))
        # `pulumi up` runs the program twice; what will change is told once, and before it does.
        if pulumi.runtime.is_dry_run():
            # An output, since those are what Pulumi waits for before the program ends.
            _: pulumi.Output[bool] = pulumi.Output.from_input(self._summarise(serving))
        self.register_outputs({})

    def _serve(
        self,
        pod: Pod,
        described: Described,
        stack: str,
        on_pod: pulumi.ResourceOptions,
        child: pulumi.ResourceOptions,
    ) -> Serving:
        settings, planned = described.settings, described.engines[pod.base]
        bundles, aliases = served_by(pod, settings, described.bundles)
        on = GpuPod(pod, settings, stack, self._left, on_pod)
        kept = [self._bundles[model] for model in sorted(bundles)] if settings.store else []
        placed = PlacedBundles(pod.base, planned.key, stack, on, bundles, kept, child)
        engine = VllmEngine(planned, pod, on, settings, stack, placed.placed, child)
        digests = {model: facts.digest for model, facts in bundles.items()}
        instance_type = pod.ec2.instance_type if pod.ec2 else None
        return Serving(pod.base, planned, digests, aliases, on, engine, instance_type)

    async def _summarise(self, serving: Sequence[Serving]) -> bool:
        pods = [await one.foreseen() for one in serving]
        pulumi.log.info(printable_text("\n".join(summary(await last_outputs(), pods))), resource=self)
        return True


def tell(described: Described) -> None:
    """Shows what is not as it might be, beside the stack file's faults: the pods' own lines stand by themselves.

    One message each, since every message has a line of its own in the list of resources too.
    """
    if described.notes:
        pulumi.log.info(printable_text("\n".join(cut(described.notes))))
    if described.warnings:
        # Pulumi writes the word before the first line alone.
        pulumi.log.warn(printable_text("\nwarning: ".join(cut(described.warnings))))


def _refuse_to_leave(gone: Collection[str], settings: Settings) -> None:
    """Raise UserError where a sandbox stays that is off, and what another base has on it would have to go."""
    if any(pod.sandbox for pod in settings.pods):
        raise UserError(
            f"lora-pods:running is false, and {listed(sorted(map(printable, gone)))} left the stack file; what it has "
            "on the sandbox goes only while that is on: set lora-pods:running to true for this change, or put the pod "
            "back"
        )


def tell_switched_off(settings: Settings, off: Sequence[str], left: Collection[str] | None) -> None:
    """Shows where `running: false` does not do what it might be taken to do."""
    if settings.running:
        return
    if hosts := [pod.base for pod in settings.pods if pod.host]:
        pulumi.log.info(
            "lora-pods:running is false; hosts are not ours to switch off, and go on: "
            f"{listed(sorted(map(printable, hosts)))}"
        )
    if never := [base for base in off if left is not None and f"{base}-activate" not in left]:
        pulumi.log.info(
            f"nothing serves {listed(sorted(map(printable, never)))} yet; that begins once lora-pods:running is true"
        )
