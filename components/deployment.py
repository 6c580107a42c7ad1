"""The whole of a stack: what the adapters are, one pod per base, its bundles and its engine."""

from __future__ import annotations

from typing import Any

import pulumi

from components.bundles import AdapterBundle, PlacedBundles
from components.core.naming import unit_name
from components.described import Described, served_by
from components.engine import VllmEngine
from components.pods.gpu_pod import GpuPod
from components.settings import Pod


class Deployment(pulumi.ComponentResource):
    """Everything a stack file asks for. `engines` is what the program exports: per base, what serves it and how."""

    engines: dict[str, Any]

    def __init__(self, name: str, described: Described, stack: str, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("lora-pods:index:Deployment", name, {}, opts)
        child = pulumi.ResourceOptions(parent=self)
        for model, facts in sorted(described.bundles.items()):
            AdapterBundle(model, facts, child)
        self.engines = {pod.base: self._serve(pod, described, stack, child) for pod in described.settings.pods}
        self.register_outputs({})

    def _serve(self, pod: Pod, described: Described, stack: str, child: pulumi.ResourceOptions) -> dict[str, Any]:
        settings, planned = described.settings, described.engines[pod.base]
        bundles, aliases = served_by(pod, settings, described.bundles)
        on = GpuPod(pod, settings, stack, child)
        placed = PlacedBundles(pod.base, planned.key, stack, on, bundles, child)
        VllmEngine(planned, pod, on, settings, stack, placed.placed, child)
        return {
            "endpoint": on.machine.endpoint,
            "unit": unit_name(planned.key),
            "models": {pod.base: None, **dict.fromkeys(aliases), **{m: f.digest for m, f in bundles.items()}},
            "flags": {flag.name: flag.value for flag in planned.plan.flags},
        }
