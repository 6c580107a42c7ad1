"""What a stack file says and what this machine knows about it: every fault is told before any resource exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from components.certificate import Tls, read_tls, warnings_of
from components.checked import memory_of, verdict_on
from components.console import program_says
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.engine_args import first_gpu
from components.core.errors import UserError, printable
from components.core.slot_budget import UTILIZATION
from components.engine import PlannedEngine, planned_engine
from components.locked import look
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
        cache = DigestCache(say=program_says())
        found = look(settings, stack, cache)
        faults += found.faults
        warnings = list(found.warnings)
        engines: dict[str, PlannedEngine] = {}
        for pod in settings.pods:
            place = settings.places[pod.base]
            tls = None
            try:
                tls = _tls(pod, settings)
            except UserError as error:
                faults.append(f"{place}.engine: {error}")
            try:
                adapters, aliases = served_by(pod, settings, found.bundles)
                engines[pod.base] = planned_engine(stack, pod, adapters, aliases, memory_of(pod, settings), tls)
                if tls and pod.engine.tls:
                    warnings += [f"{place}.engine.{said}" for said in warnings_of(tls, pod.engine.tls.certificate)]
                warnings += [f"{place}.engine: {warning}" for warning in engines[pod.base].plan.warnings]
            except UserError as error:
                faults += [f"{place}.engine: {sentence}" for sentence in error.sentences]
        verdict = verdict_on(found.present, settings, cache)
        faults += verdict.faults
        warnings += verdict.warnings
        warnings += _sharing_a_gpu(settings)
        if faults:
            raise SettingsError(faults, warnings)
        self.settings, self.bundles, self.engines = settings, found.bundles, engines
        self.notes, self.warnings = tuple(found.notes), tuple(warnings)


def _sharing_a_gpu(settings: Settings) -> Iterator[str]:
    """Each engine takes its share of the first GPU when it starts: `request_memory` of vllm/v1/worker/utils.py."""
    sharing: dict[tuple[str, int, str], list[Pod]] = {}
    for pod in settings.pods:
        if pod.host and pod.device == "gpu":
            first = first_gpu(pod.engine.args) or pod.engine.env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
            # Behind one address there may be several machines, each at a port of its own.
            sharing.setdefault((pod.host.address.casefold(), pod.host.port, first), []).append(pod)
    for (address, _, first), pods in sharing.items():
        shares = [pod.engine.gpu_memory_utilization or UTILIZATION for pod in pods]
        if len(pods) > 1 and sum(shares) >= 1:
            places = " and ".join(settings.places[pod.base] for pod in pods)
            yield (
                f"{places}: their engines take {sum(shares):.2f} of GPU {printable(first, 40)} of {printable(address)} "
                "together (gpuMemoryUtilization), and what starts last will not start; let them take less than 1, or "
                'give each its own GPU (env: {CUDA_VISIBLE_DEVICES: "1"})'
            )


def _tls(pod: Pod, settings: Settings) -> Tls | None:
    """The pod's certificate and its key; None where it has none, or no key to it, which is a fault already told."""
    if not pod.proxied or pod.engine.tls is None or settings.tls_key is None:
        return None
    path = pod.engine.tls.certificate
    return read_tls(settings.resolve(path), path, settings.tls_key)


def served_by(
    pod: Pod, settings: Settings, bundles: Mapping[str, BundleFacts]
) -> tuple[dict[str, BundleFacts], list[str]]:
    """What a pod's engine answers to beside its base: models with adapters, and other names of the base itself."""
    models = [model for model in settings.models if model.base == pod.base]
    adapters = {model.id: bundles[model.id] for model in models if model.id in bundles}
    return adapters, [model.id for model in models if not model.adapter]
