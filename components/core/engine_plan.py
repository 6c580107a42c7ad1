"""From "these models on this base" to the exact command line and environment of one vLLM.

Pure: the same models in any order give the same plan. Flags are those of vLLM 0.32 (see `vllm_rules`).
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from components.core.capacity import Unknown
from components.core.errors import UserError, printable
from components.core.listing import counted
from components.core.slot_budget import Budget, Memory, budget_of, shown
from components.core.vllm_loader import loader_rules, round_up_rank
from components.core.vllm_rules import (
    JSON_LIST_FLAGS,
    NO_SUCH_FLAGS,
    OWNED_ENVIRONMENT,
    OWNED_FLAGS,
    REPEATED_FLAGS,
    SECRET_ENVIRONMENT,
    SERVER_MODULE,
)

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None

MAX_LORAS_CAP = 8
"""How many adapters share a batch unless engine.maxLoras or what is known of the GPU's memory says so: every slot holds
memory for the largest rank."""

_DEFAULT_ENVIRONMENT = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
_DRAIN = "shutdown-timeout"
_DRAIN_SECONDS = 60
"""How long requests in flight may take to finish, unless `engine.args` says: meanwhile nobody else is served."""
_STOP_SECONDS = 30
"""What is left of stopping after that. Longer helps nobody: where requests are not done in time, vLLM 0.32 kills its
workers and then waits for the clients' connections, which do not end."""
_SMALLER = "take a larger GPU, a smaller base or engine.maxModelLen, or adapters of a smaller rank"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin"


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter to serve: the model id, `sha256:<hex>` of its bundle, and its largest real rank."""

    id: str
    digest: str
    rank: int


@dataclass(frozen=True)
class EngineOptions:
    """What the stack file's `engine:` says. None leaves the choice to this module or to vLLM."""

    port: int
    listen: str = "127.0.0.1"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    args: Mapping[str, Json] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    device: Literal["gpu", "cpu"] = "gpu"
    vllm: str | None = None
    """The version that is pinned, if one is."""
    memory: Memory | None = None
    """What is known of the GPU's memory; None where the stack file says nothing of it."""


@dataclass(frozen=True)
class PlannedFlag:
    """A computed flag (without dashes), its value as vLLM gets it, and a short clause saying why."""

    name: str
    value: str
    reason: str


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
    memory holds, and arguments or variables that are this project's own.
    """
    if not base or base.startswith("-"):
        raise UserError(f"base {printable(base)!r} cannot be given to vLLM: it is empty or begins with a dash")
    adapters = sorted(adapters, key=lambda adapter: adapter.id)
    served = _served(base, adapters, sorted(aliases), blob_path)
    arguments = _user_arguments(options.args)
    drain = _drain_seconds(arguments, options)
    flags = _lora_flags(adapters, options, arguments)
    argv = [python, "-m", SERVER_MODULE]
    argv += _flag("model", base)
    argv += ["--served-model-name", base, *sorted(aliases)]
    argv += _flag("host", options.listen)
    argv += _flag("port", options.port)
    if drain and _drain_flag(arguments) is None:
        argv += _flag(_DRAIN, drain)
    for name, value in (
        ("dtype", options.dtype),
        ("gpu-memory-utilization", options.gpu_memory_utilization),
        ("max-model-len", options.max_model_len),
    ):
        if value is not None:
            argv += _flag(name, value)
    for name in arguments:
        # Left out, 0 does for an older vLLM too, in an `engine.python` whose version nobody told.
        if name != _drain_flag(arguments) or arguments[name] != 0:
            argv += _user_flag(name, arguments[name])
    if adapters:
        argv.append("--enable-lora")
        for flag in flags:
            argv += _flag(flag.name, flag.value)
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
        (*_names_alike(list(served)), *(_quantized(arguments) if adapters else ())),
    )


def lora_target_modules(args: Mapping[str, Json]) -> tuple[str, ...] | None:
    """What `engine.args` gives vLLM as --lora-target-modules, however it is spelled; None where it is not given."""
    for key, value in args.items():
        name = _spelled(key)
        # No other flag of vLLM begins like this, and argparse takes the beginning for the whole.
        if name.startswith("lora-t") and "lora-target-modules".startswith(name):
            items = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else ()
            return tuple(map(str, items)) or None
    return None


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


def _lora_flags(
    adapters: Sequence[PlannedAdapter], options: EngineOptions, arguments: Mapping[str, Json]
) -> tuple[PlannedFlag, ...]:
    for key, value in (("maxLoras", options.max_loras), ("maxCpuLoras", options.max_cpu_loras)):
        if value is not None and value < 1:
            raise UserError(f"engine.{key} is {value}; it must be at least 1")
    if options.max_loras and options.max_cpu_loras and options.max_cpu_loras < options.max_loras:
        raise UserError(
            f"engine.maxCpuLoras ({options.max_cpu_loras}) is below engine.maxLoras ({options.max_loras}); "
            "vLLM keeps every adapter of a batch in CPU memory too, so make it at least as large"
        )
    if not adapters:
        return ()
    rank = _max_lora_rank(adapters, options)
    budget = _budget(int(rank.value), options, arguments)
    max_loras = _max_loras(len(adapters), options, budget)
    if isinstance(budget, Budget):
        rank = _with_its_cost(rank, adapters, options, budget, int(max_loras.value))
    return (max_loras, rank, _max_cpu_loras(len(adapters), int(max_loras.value), options))


def _budget(rank: int, options: EngineOptions, arguments: Mapping[str, Json]) -> Budget | Unknown | None:
    """What the engine has of its GPU; None where nothing is said of that."""
    if options.memory is None:
        return None
    return budget_of(
        options.memory,
        rank,
        version=loader_rules(options.vllm).minor,
        max_model_len=options.max_model_len,
        utilization=options.gpu_memory_utilization,
        dtype=options.dtype,
        targets=lora_target_modules(options.args),
        arguments=arguments,
    )


def _max_loras(count: int, options: EngineOptions, budget: Budget | Unknown | None) -> PlannedFlag:
    value, reason = _chosen_max_loras(count, options, budget.most if isinstance(budget, Budget) else None)
    if isinstance(budget, Unknown):
        reason += f"; the GPU's memory is not counted: {budget.reason}"
    elif budget is not None:
        if not budget.fits(value):
            mend = "lower engine.maxLoras" if options.max_loras and budget.fits(1) else _SMALLER
            raise UserError(f"{budget.excess(value)}; {mend}")
        reason += f": {budget.told(value)}"
    return PlannedFlag("max-loras", str(value), reason)


def _chosen_max_loras(count: int, options: EngineOptions, fitting: int | None) -> tuple[int, str]:
    """How many adapters share a batch, and why; `fitting` is how many should by the GPU's memory, where it is known."""
    limit = MAX_LORAS_CAP if fitting is None else max(1, fitting)
    if options.max_loras is not None:
        return options.max_loras, "engine.maxLoras"
    if options.max_cpu_loras is not None and options.max_cpu_loras < min(count, limit):
        return options.max_cpu_loras, f"{counted(count, 'adapter')}, capped by engine.maxCpuLoras"
    if count <= limit:
        return count, f"{counted(count, 'adapter')}, all may share a batch"
    if fitting is None:
        return limit, f"{counted(count, 'adapter')}, capped at {limit} for memory"
    return limit, f"{counted(count, 'adapter')}, as many as {'leave the KV cache its share' if fitting else 'can be'}"


def _with_its_cost(
    rank: PlannedFlag, adapters: Sequence[PlannedAdapter], options: EngineOptions, budget: Budget, slots: int
) -> PlannedFlag:
    """The rank's flag, with what the one adapter costs that raises it for all."""
    _, *others = sorted((adapter.rank for adapter in adapters), reverse=True)
    if options.max_lora_rank is not None or not others:
        return rank
    lower = round_up_rank(others[0], loader_rules(options.vllm))
    if lower == budget.rank:
        return rank
    more = slots * (budget.slot - budget.slot * lower // budget.rank)
    return replace(rank, reason=f"{rank.reason}, and raises it from {lower} for all slots, +{shown(more)}")


def _max_lora_rank(adapters: Sequence[PlannedAdapter], options: EngineOptions) -> PlannedFlag:
    largest = adapters[0]
    rules = loader_rules(options.vllm)
    for adapter in adapters:
        try:
            round_up_rank(adapter.rank, rules)
        except UserError as error:
            raise UserError(f"model {adapter.id}: {error}") from None
        if adapter.rank > largest.rank:
            largest = adapter
    if options.max_lora_rank is None:
        return PlannedFlag(
            "max-lora-rank",
            str(round_up_rank(largest.rank, rules)),
            f"largest rank is {largest.rank} ({largest.id})",
        )
    if options.max_lora_rank not in rules.legal_ranks:
        legal = ", ".join(map(str, rules.legal_ranks))
        raise UserError(f"engine.maxLoraRank is {options.max_lora_rank}; vLLM {rules.version} accepts {legal}")
    if options.max_lora_rank < largest.rank:
        raise UserError(
            f"engine.maxLoraRank is {options.max_lora_rank}, but model {largest.id} has rank {largest.rank}; "
            "raise it or leave it out"
        )
    return PlannedFlag("max-lora-rank", str(options.max_lora_rank), "engine.maxLoraRank")


def _max_cpu_loras(count: int, max_loras: int, options: EngineOptions) -> PlannedFlag:
    if options.max_cpu_loras is not None:
        return PlannedFlag("max-cpu-loras", str(options.max_cpu_loras), "engine.maxCpuLoras")
    if max_loras > count:
        return PlannedFlag("max-cpu-loras", str(max_loras), "as many as max-loras")
    return PlannedFlag("max-cpu-loras", str(count), f"{counted(count, 'adapter')}, all stay in CPU memory")


def _user_arguments(args: Mapping[str, Json]) -> dict[str, Json]:
    """Return `engine.args` under vLLM's spelling of the flags, sorted by it."""
    keys: dict[str, str] = {}
    for key in args:
        name = _flag_name(key)
        if name in keys:
            raise UserError(f"engine.args.{key} and engine.args.{keys[name]} are one flag; keep one of them")
        keys[name] = key
    return {name: args[keys[name]] for name in sorted(keys)}


def _drain_seconds(arguments: Mapping[str, Json], options: EngineOptions) -> int:
    """How long `--shutdown-timeout` lets requests in flight go on after the order to stop; 0, as none, aborts them."""
    given = _drain_flag(arguments)
    if given is None:
        return _DRAIN_SECONDS if loader_rules(options.vllm).drains else 0
    value = arguments[given]
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return math.ceil(value) if isinstance(value, int | float) and 0 <= value < 86400 else 0


def _drain_flag(arguments: Mapping[str, Json]) -> str | None:
    """Under which name they hold `--shutdown-timeout`: argparse takes a beginning of its own for the whole."""
    return next((name for name in arguments if name.startswith("shu") and _DRAIN.startswith(name)), None)


def _flag_name(key: str) -> str:
    """Return `maxNumSeqs`, `max_num_seqs` or `max-num-seqs` in vLLM's spelling, refusing what is not the user's."""
    where = f"engine.args.{printable(key)}"
    if key.startswith("-"):
        raise UserError(f"{where}: write the flag without its dashes in front")
    name = _spelled(key)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise UserError(
            f"{where} is no flag of vLLM: letters, digits and dashes only "
            "(give a flag's own settings as a mapping under it)"
        )
    # argparse takes any unambiguous beginning of a flag for the flag, and --no-X for X.
    bare = name.removeprefix("no-")
    for owned, reason in {**OWNED_FLAGS, **NO_SUCH_FLAGS}.items():
        if owned.startswith(bare):
            hint = "" if owned == bare else f" could be read as --{owned}, which"
            raise UserError(f"{where}{hint} cannot be set here: {reason}")
    return name


def _spelled(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", key).replace("_", "-").lower()


def _user_flag(name: str, value: Json) -> list[str]:
    where = f"engine.args: {name}"
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if value is None:
        raise UserError(f"{where} has no value; give it one (true for a bare flag) or leave it out")
    if isinstance(value, Mapping):
        return [f"--{name}", _compact(value)]
    if isinstance(value, str | int | float):
        return _flag(name, value)
    items = list(value)
    if not items:
        raise UserError(f"{where} is an empty list; give it a value or leave it out")
    if name in JSON_LIST_FLAGS:
        return [f"--{name}", _compact(items)]
    if name in REPEATED_FLAGS:
        return [word for item in items for word in _flag(name, _scalar(item, where))]
    if len(items) == 1:
        return _flag(name, _scalar(items[0], where))
    words = [_word(_scalar(item, where), name) for item in items]
    if any(word.startswith("-") for word in words):
        raise UserError(f"{where} has an item that begins with a dash, which vLLM would take for a flag")
    return [f"--{name}", *words]


def _scalar(item: Json, where: str) -> str | int | float:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise UserError(f"{where} is a list, and its items must be strings or numbers")
    return item


def _flag(name: str, value: str | int | float) -> list[str]:
    word = _word(value, name)
    # As a word of its own vLLM's parser would take it for a flag, or (with a dot in it) for a nested setting.
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]


def _word(value: str | int | float, name: str) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, which is no number vLLM can use")
        # Pulumi's configuration does not tell 8.0 from 8, and vLLM's integers refuse the former.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value)


def _compact(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


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
