"""The whole of a stack: what the adapters are, one pod per base, its bundles and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi

from components.bundles import AdapterBundle, PlacedBundles
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError
from components.core.naming import unit_name
from components.engine import PlannedEngine, VllmEngine, planned_engine
from components.pods.gpu_pod import GpuPod
from components.settings import Pod, RawConfig, Settings, SettingsError, parse, secrecy_faults


class Described:
    """A stack file with all that this machine can say about it before any resource exists.

    `bundles` maps model ids to what their adapters are; `engines` maps bases to what will serve them.
    """

    settings: Settings
    bundles: Mapping[str, BundleFacts]
    engines: Mapping[str, PlannedEngine]

    def __init__(self, config: RawConfig, stack: str) -> None:
        """Raises SettingsError with every fault of the file, of the adapters and of the plans together."""
        settings, faults = parse(config)
        faults += secrecy_faults(config)
        with_adapters = [model for model in settings.models if model.adapter]
        directories = [settings.adapter_directory(model) for model in with_adapters]
        bundles: dict[str, BundleFacts] = {}
        for model, found in zip(with_adapters, DigestCache().describe_all(directories), strict=True):
            if isinstance(found, UserError):
                faults.append(f"{settings.places[model.id]}.adapter: {found}")
            else:
                bundles[model.id] = found
        engines: dict[str, PlannedEngine] = {}
        for pod in settings.pods:
            try:
                engines[pod.base] = planned_engine(stack, pod, *_served(pod, settings, bundles))
            except UserError as error:
                faults.append(f"{settings.places[pod.base]}.engine: {error}")
        if faults:
            raise SettingsError(faults)
        self.settings, self.bundles, self.engines = settings, bundles, engines


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
        bundles, aliases = _served(pod, settings, described.bundles)
        on = GpuPod(pod, settings, stack, child)
        placed = PlacedBundles(pod.base, planned.key, stack, on, bundles, child)
        VllmEngine(planned, pod, on, settings, stack, placed.placed, child)
        return {
            "endpoint": on.machine.endpoint,
            "unit": unit_name(planned.key),
            "models": {pod.base: None, **dict.fromkeys(aliases), **{m: f.digest for m, f in bundles.items()}},
            "flags": {flag.name: flag.value for flag in planned.plan.flags},
        }


def _served(
    pod: Pod, settings: Settings, bundles: Mapping[str, BundleFacts]
) -> tuple[dict[str, BundleFacts], list[str]]:
    """What a pod's engine answers to beside its base: models with adapters, and other names of the base itself."""
    models = [model for model in settings.models if model.base == pod.base]
    adapters = {model.id: bundles[model.id] for model in models if model.id in bundles}
    return adapters, [model.id for model in models if not model.adapter]
