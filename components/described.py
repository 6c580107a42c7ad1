"""What a stack file says and what this machine knows about it: every fault is told before any resource exists."""

from __future__ import annotations

from collections.abc import Mapping

from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError
from components.engine import PlannedEngine, planned_engine
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
                engines[pod.base] = planned_engine(stack, pod, *served_by(pod, settings, bundles))
            except UserError as error:
                faults.append(f"{settings.places[pod.base]}.engine: {error}")
        if faults:
            raise SettingsError(faults)
        self.settings, self.bundles, self.engines = settings, bundles, engines


def served_by(
    pod: Pod, settings: Settings, bundles: Mapping[str, BundleFacts]
) -> tuple[dict[str, BundleFacts], list[str]]:
    """What a pod's engine answers to beside its base: models with adapters, and other names of the base itself."""
    models = [model for model in settings.models if model.base == pod.base]
    adapters = {model.id: bundles[model.id] for model in models if model.id in bundles}
    return adapters, [model.id for model in models if not model.adapter]
