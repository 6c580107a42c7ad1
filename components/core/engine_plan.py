"""From "these models on this base" to the exact command line and environment of one vLLM.

Pure: the same models in any order give the same plan. Flags are those of vLLM 0.32 (see `vllm_rules`).
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from components.core.engine_args import (
    Json,
    argv_of,
    flag_words,
    gpu_fault,
    idle_gpus,
    parsed_arguments,
)
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.errors import UserError, printable
from components.core.lora_flags import PlannedFlag, empty_slots, lora_flags
from components.core.slot_budget import DTYPES
from components.core.vllm_loader import DRAINS_SINCE, loader_rules
from components.core.vllm_rules import (
    OWNED_ENVIRONMENT,
    SECRET_ENVIRONMENT,
    SERVER_MODULE,
)

_DEFAULT_ENVIRONMENT = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
_DRAIN = "shutdown-timeout"
_DRAIN_SECONDS = 60
"""How long requests in flight may take to finish, unless `engine.args` says: meanwhile nobody else is served."""
_STOP_SECONDS = 30
"""What is left of stopping after that. Longer helps nobody: where requests are not done in time, vLLM 0.32 kills its
workers and then waits for the clients' connections, which do not end."""
_DAY = 86400
# `assert inputs.dtype in [torch.float16, torch.bfloat16]` in vllm/lora/ops/triton_ops/lora_shrink_op.py (0.32.0)
_NO_LORA_ON_GPUS = ("float", "float32")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin"


@dataclass(frozen=True)
class EnginePlan:
    """One engine: `argv` to the word, its environment, what was computed, and what /v1/models must list.

    `served` maps each id to the `root` that vLLM reports for it: the base for base names, the blob's path for adapters.
    `stop_seconds` is how long it may take to stop before it is killed; `gpu` says whether it needs one.
    """

    base: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    flags: tuple[PlannedFlag, ...]
    served: Mapping[str, str | None]
    stop_seconds: int
    gpu: bool
    warnings: tuple[str, ...] = ()
    """What is allowed and may not be meant: whole sentences."""


def plan_engine(
    base: str,
    python: str,
    adapters: Sequence[PlannedAdapter],
    aliases: Sequence[str],
    options: EngineOptions,
    blob_path: Callable[[str], str],
) -> EnginePlan:
    """Plan the vLLM that serves `base`, its other names `aliases`, and every adapter.

    `python` is the pod's interpreter with vLLM; `blob_path` says where a digest lies unpacked. Raises UserError for a
    base vLLM could not be told, a rank above its ceiling, overrides that contradict each other, more than the GPU's
    memory holds, more GPUs than its machine has, arguments that its vLLM does not take, and arguments or variables that
    are this project's own.
    """
    if not base or base.startswith("-"):
        raise UserError(f"base {printable(base)!r} cannot be given to vLLM: it is empty or begins with a dash")
    adapters = sorted(adapters, key=lambda adapter: adapter.id)
    served = _served(base, adapters, sorted(aliases), blob_path)
    arguments, told = parsed_arguments(options.args, options.vllm)
    told += _shared_gpus(options)
    drain = _drain_seconds(arguments, options)
    _check_dtype(adapters, options)
    flags = lora_flags(adapters, options, arguments)
    argv = [python, "-m", SERVER_MODULE]
    argv += flag_words("model", base)
    argv += ["--served-model-name", base, *sorted(aliases)]
    argv += flag_words("host", options.listen)
    argv += flag_words("port", options.port)
    if drain and _drain_flag(arguments) is None:
        argv += flag_words(_DRAIN, drain)
    for name, value in (
        ("dtype", options.dtype),
        ("gpu-memory-utilization", options.gpu_memory_utilization),
        ("max-model-len", options.max_model_len),
    ):
        if value is not None:
            argv += flag_words(name, value)
    # Left out, it does for an older vLLM too, in an `engine.python` whose version nobody told.
    left_out = _drain_flag(arguments) if _drains_never(arguments) else None
    argv += argv_of({name: value for name, value in arguments.items() if name != left_out}, options.vllm)
    if adapters:
        argv.append("--enable-lora")
        for flag in flags:
            argv += flag_words(flag.name, flag.value)
        argv.append("--lora-modules")
        argv += [_lora_module(adapter, base, blob_path(adapter.digest)) for adapter in adapters]
    return EnginePlan(
        base,
        tuple(argv),
        _environment(python, options.env, eager_cpu=options.device == "cpu" and arguments.get("enforce-eager") is True),
        flags,
        served,
        _STOP_SECONDS + drain,
        options.device == "gpu",
        (
            *_names_alike(list(served)),
            *(_quantized(arguments) if adapters else ()),
            *(empty_slots(adapters, options) if adapters else ()),
            *told,
        ),
    )


def _shared_gpus(options: EngineOptions) -> Iterator[str]:
    gpus = options.gpus
    if options.instance_type and gpus and options.device == "gpu":
        if fault := gpu_fault(options.args, options.instance_type, gpus):
            raise UserError(fault)
        yield from idle_gpus(options.args, options.instance_type, gpus)


def _check_dtype(adapters: Sequence[PlannedAdapter], options: EngineOptions) -> None:
    if options.dtype is None:
        return
    if options.dtype not in DTYPES:
        raise UserError(f"engine.dtype is {printable(options.dtype)!r}; vLLM takes {', '.join(sorted(DTYPES))}")
    if adapters and options.device == "gpu" and options.dtype in _NO_LORA_ON_GPUS:
        raise UserError(
            f"engine.dtype is {options.dtype}, in which vLLM serves no adapters on a GPU; set bfloat16, or float16 "
            "where the GPU is older than Ampere"
        )


def _names_alike(names: Sequence[str]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.casefold(), []).append(name)
    for same in sorted(sorted(group) for group in alike.values() if len(group) > 1):
        yield (
            f"{' and '.join(map(printable, same))} differ only in upper and lower case; vLLM tells them apart, but "
            "whoever asks for them may not. Give each a name of its own."
        )


def _quantized(arguments: Mapping[str, Json]) -> Iterator[str]:
    """vLLM finds out while it loads: the layers it adapts are listed by kind of layer, not by quantisation."""
    method = arguments.get("quantization")
    if isinstance(method, str):
        yield (
            f"args.quantization is {printable(method)}, and vLLM serves adapters on a quantised base for some "
            "architectures only. Where it does not, the engine ends while it starts; try it on a pod that nobody "
            "waits for."
        )


def _served(
    base: str, adapters: Sequence[PlannedAdapter], aliases: Sequence[str], blob_path: Callable[[str], str]
) -> dict[str, str | None]:
    served: dict[str, str | None] = {}
    roots = [(base, base), *((alias, base) for alias in aliases)]
    if "None" in (base, *aliases):
        raise UserError("model id 'None' without an adapter cannot be served: vLLM reads it as no name at all")
    for name, root in [*roots, *((adapter.id, blob_path(adapter.digest)) for adapter in adapters)]:
        if name in served:
            raise UserError(f"model id {printable(name)!r} is served twice by the engine of {printable(base)!r}")
        served[name] = root
    return served


def _drain_seconds(arguments: Mapping[str, Json], options: EngineOptions) -> int:
    """How long `--shutdown-timeout` lets requests in flight go on after the order to stop; 0, as none, aborts them."""
    given = _drain_flag(arguments)
    if given is None:
        return _DRAIN_SECONDS if loader_rules(options.vllm).drains else 0
    try:
        seconds = float(str(arguments[given]))  # a text of digits is a number to vLLM, too
    except ValueError:
        return 0
    if seconds > _DAY:
        raise UserError(
            f"engine.args.shutdownTimeout: {seconds:g} s is too long; systemd waits a day ({_DAY} s) at most"
        )
    return math.ceil(max(0.0, seconds))


def oldest_vllm(args: Mapping[str, Json]) -> str | None:
    """The oldest release that knows what a unit with these `engine.args` says to it; None where any may do.

    For an `engine.python`, whose release only the pod knows. Raises UserError as `parsed_arguments` does.
    """
    return None if _drains_never(parsed_arguments(args, None)[0]) else DRAINS_SINCE


def _drains_never(arguments: Mapping[str, Json]) -> bool:
    given = _drain_flag(arguments)
    return given is not None and str(arguments[given]) == "0"


def _drain_flag(arguments: Mapping[str, Json]) -> str | None:
    """Under which name they hold `--shutdown-timeout`: argparse takes a beginning of its own for the whole."""
    return next((name for name in arguments if name.startswith("shu") and _DRAIN.startswith(name)), None)


def _lora_module(adapter: PlannedAdapter, base: str, path: str) -> str:
    item = {"name": adapter.id, "path": path, "base_model_name": base}
    return json.dumps(item, ensure_ascii=False, separators=(",", ":"))


def _environment(python: str, env: Mapping[str, str], eager_cpu: bool) -> dict[str, str]:
    for name in env:
        where = f"engine.env.{printable(name)}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"{where} is no name of a variable: letters, digits and _ only, no digit first")
        if name in SECRET_ENVIRONMENT:
            raise UserError(
                f"{where} holds a secret, which would stand in the unit for every user of the pod to read; "
                f"use `pulumi config set --secret {SECRET_ENVIRONMENT[name]}`"
            )
        if name in OWNED_ENVIRONMENT:
            raise UserError(f"{where} cannot be set here: {OWNED_ENVIRONMENT[name]}")
    # vLLM builds kernels with tools (ninja, nvcc) it looks for on PATH, as in an activated venv.
    path = f"{posixpath.dirname(python)}:{_SYSTEM_PATH}"
    # vLLM 0.32 compiles what counts logprobs even where it compiles nothing else (v1/sample/ops/logprobs.py), and on a
    # CPU without a C++ compiler the first request for logprobs, the probe's or a client's, ends the engine.
    default = {**_DEFAULT_ENVIRONMENT, **({"TORCH_COMPILE_DISABLE": "1"} if eager_cpu else {})}
    return dict(sorted({**default, "PATH": path, **env}.items()))
