"""How many adapters share a batch, and how much memory each gets: `--max-loras`, `--max-lora-rank`, `--max-cpu-loras`.

Each with the reason that a preview shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from components.core.capacity import BaseSizes, Unknown, unshareable
from components.core.engine_args import Json, lora_target_modules
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.errors import UserError
from components.core.listing import counted
from components.core.slot_budget import GPUS_AT_MOST, REQUESTS_BY_DEFAULT, VERSIONS, Budget, budget_of, shown, whole
from components.core.vllm_loader import loader_rules, round_up_rank

MAX_LORAS_CAP = 8
"""How many adapters share a batch unless engine.maxLoras or what is known of the GPU's memory says so: every slot holds
memory for the largest rank."""

_OFTEN_TAKEN = 0.9
"""Of a GPU's memory by an engine that has it for itself."""


@dataclass(frozen=True)
class PlannedFlag:
    """A computed flag (without dashes), its value as vLLM gets it, and a short clause saying why."""

    name: str
    value: str
    reason: str


def lora_flags(
    adapters: Sequence[PlannedAdapter], options: EngineOptions, arguments: Mapping[str, Json]
) -> tuple[PlannedFlag, ...]:
    """`--max-loras`, `--max-lora-rank` and `--max-cpu-loras`; none of them without adapters.

    `arguments` are the engine's other flags in vLLM's spelling. Raises UserError for a rank above vLLM's ceiling,
    overrides that contradict each other, and more than the GPU's memory holds.
    """
    for key, value in (("maxLoras", options.max_loras), ("maxCpuLoras", options.max_cpu_loras)):
        if value is not None and value < 1:
            raise UserError(f"engine.{key} is {value}; it must be at least 1")
    if options.max_loras and options.max_cpu_loras and options.max_cpu_loras < options.max_loras:
        raise UserError(
            f"engine.maxCpuLoras ({options.max_cpu_loras}) is below engine.maxLoras ({options.max_loras}); "
            "vLLM keeps every adapter of a batch in CPU memory too, so make it at least as large"
        )
    if not adapters:
        budget = _budget(0, options, arguments)
        if isinstance(budget, Budget) and not budget.fits(0):
            raise UserError(f"{budget.excess(0)}; {_smaller(budget, 0, options)}")
        return ()
    rank = _max_lora_rank(adapters, options)
    budget = _budget(int(rank.value), options, arguments)
    requests = whole(arguments.get("max-num-seqs"))
    max_loras = _max_loras(len(adapters), options, budget, requests)
    if isinstance(budget, Budget):
        rank = _with_its_cost(rank, adapters, options, budget, int(max_loras.value), requests)
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


def _max_loras(
    count: int, options: EngineOptions, budget: Budget | Unknown | None, requests: int | None
) -> PlannedFlag:
    value, reason = _chosen_max_loras(count, options, budget if isinstance(budget, Budget) else None, requests)
    if isinstance(budget, Unknown):
        reason += f"; the GPU's memory is not counted: {budget.reason}"
    elif budget is not None:
        if not budget.fits(value):
            mend = _smaller(budget, value, options)
            if options.max_loras and budget.fits(1):
                mend = f"lower engine.maxLoras to {max(1, budget.most)}, or leave it out"
            raise UserError(f"{budget.excess(value)}; {mend}")
        reason += f": {budget.told(value)}"
    return PlannedFlag("max-loras", str(value), reason)


def _untold(options: EngineOptions) -> str:
    """What the stack file could say so that a GPU's memory is counted."""
    if options.memory is not None or options.device != "gpu" or loader_rules(options.vllm).minor not in VERSIONS:
        return ""
    memory = "" if options.gpus else "engine.gpuMemoryGiB and "
    length = " (and engine.maxModelLen)" if options.max_model_len is None else ""
    return f"; {memory}baseConfig{length} would tell how many fit"


def _smaller(budget: Budget, slots: int, options: EngineOptions) -> str:
    """What to do where not everything fits."""
    ways = ["a larger GPU", "a smaller base"]
    more = _more_gpus(budget, options)
    if more is not None:
        ways.insert(1, f"more GPUs (engine.args: {{tensorParallelSize: {more}}})")
    if options.gpu_memory_utilization is not None and options.gpu_memory_utilization < _OFTEN_TAKEN:
        ways.insert(0, "a larger engine.gpuMemoryUtilization")
    if budget.weights + slots * budget.slot < budget.share:
        ways.append("a smaller engine.maxModelLen")
    if slots and budget.weights + budget.request < budget.share:
        ways.append("adapters of a smaller rank")
    return f"take {', '.join(ways[:-1])} or {ways[-1]}"


def _more_gpus(budget: Budget, options: EngineOptions) -> int | None:
    """The next number of GPUs that can share the base; None where the machine has no more, or nobody can tell."""
    base = options.memory.base if options.memory else None
    if not isinstance(base, BaseSizes):
        return None
    numbers = range(budget.gpus + 1, (options.gpus.count if options.gpus else GPUS_AT_MOST) + 1)
    return next((number for number in numbers if unshareable(base, number) is None), None)


def _chosen_max_loras(
    count: int, options: EngineOptions, budget: Budget | None, requests: int | None
) -> tuple[int, str]:
    """How many adapters share a batch, and why.

    `budget` is what there is of the GPU's memory, where it is known; `requests` is how many requests share a batch
    (--max-num-seqs), where it is given.
    """
    limit = MAX_LORAS_CAP if budget is None else max(1, budget.most)
    if options.max_loras is not None:
        return options.max_loras, "engine.maxLoras"
    kept = count if options.max_cpu_loras is None else options.max_cpu_loras
    if kept < min(count, limit, requests or (count if budget is None else REQUESTS_BY_DEFAULT)):
        return kept, f"{counted(count, 'adapter')}, capped by engine.maxCpuLoras"
    if requests is not None and requests < min(count, limit):
        return requests, f"{counted(count, 'adapter')}, as many as requests share a batch (maxNumSeqs)"
    if requests is None and budget is not None and min(count, limit) > REQUESTS_BY_DEFAULT:
        return REQUESTS_BY_DEFAULT, (
            f"{counted(count, 'adapter')}, capped at {REQUESTS_BY_DEFAULT} since a slot takes time as well; "
            "engine.args: maxNumSeqs sets another cap"
        )
    if count <= limit:
        return count, f"{counted(count, 'adapter')}, all may share a batch"
    if budget is None:
        return limit, f"{counted(count, 'adapter')}, capped at {limit} for memory{_untold(options)}"
    why = f"as many as {budget.rule}" if budget.most else "one at a time, and even that leaves the KV cache too little"
    return limit, f"{counted(count, 'adapter')}, {why}"


def _with_its_cost(
    rank: PlannedFlag,
    adapters: Sequence[PlannedAdapter],
    options: EngineOptions,
    budget: Budget,
    slots: int,
    requests: int | None,
) -> PlannedFlag:
    """The rank's flag, with what the one adapter costs that raises it for all."""
    _, *others = sorted((adapter.rank for adapter in adapters), reverse=True)
    if options.max_lora_rank is not None or not others:
        return rank
    lower = round_up_rank(others[0], loader_rules(options.vllm))
    if lower == budget.rank:
        return rank
    cheaper = budget.at(lower)
    without, _ = _chosen_max_loras(len(others), options, cheaper, requests)
    if slots < without:
        cost = f"; without it, {without} adapters could share a batch"
    else:
        cost = f", +{shown(slots * (budget.slot - cheaper.slot))}"
    return replace(rank, reason=f"{rank.reason}, and raises it from {lower} for all slots{cost}")


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


def empty_slots(adapters: Sequence[PlannedAdapter], options: EngineOptions) -> Iterator[str]:
    """What to know of slots that no adapter is there for."""
    if options.max_loras is not None and options.max_loras > len(adapters):
        yield (
            f"engine.maxLoras is {options.max_loras} for {counted(len(adapters), 'adapter')}; the other slots stay "
            "empty, and take memory and time all the same. Lower it, or leave it out."
        )
