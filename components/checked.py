"""The adapters of a stack held against what will serve them: the program's check, and `lora lock`'s."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from components.core.adapter_files import is_directory, shown_path
from components.core.capacity import GIB, Unknown
from components.core.check.adapter_check import Against
from components.core.check.base_model import BaseFacts, longest_context, read_base_config
from components.core.check.base_sizes import sizes_of
from components.core.check.remembered import check_all
from components.core.check.told_once import Checked, told_once
from components.core.digest_cache import DigestCache
from components.core.ec2_gpus import gpus_of
from components.core.engine_args import lora_target_modules, overrides_config
from components.core.errors import printable
from components.core.findings import FaultError, Finding
from components.core.slot_budget import Memory
from components.core.vllm_loader import version_warning
from components.locked import Present
from components.settings import Pod, Settings

_LONGER_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass
class Verdict:
    """What was found: whole lines, each with its path in the stack file."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def verdict_on(present: Sequence[Present], settings: Settings, cache: DigestCache) -> Verdict:
    """Check the adapters that are on this machine, each against the pod that serves its base.

    A base's config.json that cannot be read is a fault here; a base without a pod is one of the stack file's.
    """
    verdict = Verdict()
    against = {pod.base: _against(pod, settings, verdict) for pod in settings.pods}
    findings = check_all(
        cache, [(one.directory, one.answer, against.get(one.model.base, Against(one.model.base))) for one in present]
    )
    checked = [
        Checked(one.model.id, settings.places[one.model.id], [_as_written(finding, one) for finding in each])
        for one, each in zip(present, findings, strict=True)
    ]
    verdict.faults += told_once(checked, "error")
    verdict.warnings += told_once(checked, "warning")
    return verdict


def memory_of(pod: Pod, settings: Settings) -> Memory | None:
    """What is known of the memory of a pod's GPU and of its base's sizes; None where the stack file asks for no sum.

    An instance type says something only together with the base's config.json. What cannot be read is told by
    `verdict_on`.
    """
    gpus, path = gpus_of(pod.ec2.instance_type) if pod.ec2 else None, settings.base_config(pod)
    if pod.device == "cpu":
        return None
    if pod.engine.gpu_memory_gi_b is not None:
        memory = int(pod.engine.gpu_memory_gi_b * GIB)
    elif gpus is not None and path is not None:
        memory = gpus.gpu.memory_mib * 1024**2
    else:
        return Memory(0, Unknown("engine.gpuMemoryGiB is not given")) if pod.base_config else None
    if path is None:
        return Memory(memory, Unknown("the base's config.json is not at hand (baseConfig)"))
    try:
        config, base = read_base_config(path)
    except FaultError:
        return None
    # ModelOpt writes its quantisation there: `get_config` of vllm/transformers_utils/config.py (0.32.0).
    if os.path.lexists((path if is_directory(path) else path.parent) / "hf_quant_config.json"):
        return Memory(memory, Unknown("what a weight takes by hf_quant_config.json is not known here"))
    return Memory(memory, sizes_of(config, base))


def _against(pod: Pod, settings: Settings, verdict: Verdict) -> Against:
    warning = version_warning(pod.vllm_version)
    if warning and any(model.adapter for model in settings.models if model.base == pod.base):
        verdict.warnings.append(f"{settings.places[pod.base]}.engine.vllm.version: {warning}")
    return Against(
        pod.base, _base_model(pod, settings, verdict), pod.vllm_version, lora_target_modules(pod.engine.args)
    )


def _base_model(pod: Pod, settings: Settings, verdict: Verdict) -> BaseFacts | None:
    """What the base's config.json says of it; None where there is none at hand, or none that can be read: a fault."""
    path = settings.base_config(pod)
    if path is None:
        return None
    try:
        config, base = read_base_config(path)
    except FaultError as error:
        key, written = ("baseConfig", pod.base_config) if pod.base_config else ("sandbox.volumes", pod.base)
        verdict.faults.append(f"{settings.places[pod.base]}.{key}: {printable(written)}: {error.finding.message}")
        return None
    asked, longest = pod.engine.max_model_len, longest_context(config)
    # As vllm/envs.py reads it.
    allowed = pod.engine.env.get(_LONGER_ALLOWED, "0").strip().lower() in ("1", "true")
    overridden = allowed or overrides_config(pod.engine.args)
    if asked and longest and asked > longest and not overridden:
        verdict.warnings.append(
            f"{settings.places[pod.base]}.engine.maxModelLen: {asked} is more than the base was made for "
            f"(max_position_embeddings is {longest}), and vLLM will not start; lower it, or set env: "
            f'{{{_LONGER_ALLOWED}: "1"}}'
        )
    return base


def _as_written(finding: Finding, one: Present) -> Finding:
    """With the directory as the stack file has it: where this is read, this machine's folders may say nothing."""
    return replace(finding, path=printable(one.model.adapter)) if finding.path == shown_path(one.directory) else finding
