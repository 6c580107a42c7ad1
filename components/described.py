"""What a stack file says and what this machine knows about it: every fault is told before any resource exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from components.core.check.adapter_check import Against
from components.core.check.base_model import BaseModel, read_base_model
from components.core.check.told_once import Checked, told_once
from components.core.check.vllm_loader import version_warning
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError
from components.engine import PlannedEngine, planned_engine
from components.locked import Present, look
from components.settings import Pod, RawConfig, Settings, SettingsError, parse, secrecy_faults


class Described:
    """A stack file with all that this machine can say about it before any resource exists.

    `bundles` maps model ids to what their adapters are; `engines` maps bases to what will serve them. `notes` and
    `warnings` are sentences for whoever runs this.
    """

    settings: Settings
    bundles: Mapping[str, BundleFacts]
    engines: Mapping[str, PlannedEngine]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __init__(self, config: RawConfig, stack: str) -> None:
        """Raises SettingsError with every fault of the file, of its lock, of the adapters and of the plans together."""
        settings, faults = parse(config)
        faults += secrecy_faults(config)
        cache = DigestCache()
        found = look(settings, stack, cache)
        faults += found.faults
        warnings = list(found.warnings)
        engines: dict[str, PlannedEngine] = {}
        against: dict[str, Against] = {}
        for pod in settings.pods:
            place = settings.places[pod.base]
            try:
                engines[pod.base] = planned_engine(stack, pod, *served_by(pod, settings, found.bundles))
                warnings += [f"{place}.engine: {warning}" for warning in engines[pod.base].plan.warnings]
            except UserError as error:
                faults.append(f"{place}.engine: {error}")
            version = pod.vllm_version
            warning = version_warning(version)
            if warning and any(model.adapter for model in settings.models if model.base == pod.base):
                warnings.append(f"{place}.engine.vllm.version: {warning}")
            base_model = _base_model(pod, settings, faults)
            against[pod.base] = Against(pod.base, base_model, version, _target_modules(engines.get(pod.base)))
        checked = _checked(found.present, settings, against, cache)
        faults += told_once(checked, "error")
        warnings += told_once(checked, "warning")
        if faults:
            raise SettingsError(faults, warnings)
        self.settings, self.bundles, self.engines = settings, found.bundles, engines
        self.notes, self.warnings = tuple(found.notes), tuple(warnings)


def served_by(
    pod: Pod, settings: Settings, bundles: Mapping[str, BundleFacts]
) -> tuple[dict[str, BundleFacts], list[str]]:
    """What a pod's engine answers to beside its base: models with adapters, and other names of the base itself."""
    models = [model for model in settings.models if model.base == pod.base]
    adapters = {model.id: bundles[model.id] for model in models if model.id in bundles}
    return adapters, [model.id for model in models if not model.adapter]


def _base_model(pod: Pod, settings: Settings, faults: list[str]) -> BaseModel | None:
    """What the base's config.json says of it; None where there is none at hand, or none that can be read: a fault."""
    path = settings.base_config(pod)
    try:
        return read_base_model(path) if path else None
    except UserError as error:
        key = "baseConfig" if pod.base_config else "sandbox.volumes"
        faults.append(f"{settings.places[pod.base]}.{key}: {error}")
        return None


def _target_modules(planned: PlannedEngine | None) -> tuple[str, ...] | None:
    """What --lora-target-modules says, however the stack file spells it."""
    argv = planned.plan.argv if planned else ()
    flag = "--lora-target-modules"
    if flag not in argv:
        return None
    return tuple(takewhile(lambda word: not word.startswith("--"), argv[argv.index(flag) + 1 :]))


def _checked(
    present: Sequence[Present], settings: Settings, against: Mapping[str, Against], cache: DigestCache
) -> list[Checked]:
    """What is found in the adapters that are on this machine. A base without a pod is a fault of the stack file's."""
    items = [(one.directory, one.answer, against.get(one.model.base, Against(one.model.base))) for one in present]
    findings = cache.check_all(items)
    return [
        Checked(one.model.id, settings.places[one.model.id], each) for one, each in zip(present, findings, strict=True)
    ]
