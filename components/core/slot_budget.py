"""How many adapters may share a batch on a GPU of known memory.

The rule: their slots take at most a quarter of what the weights leave, and leave the KV cache room for four requests of
`maxModelLen` tokens. Where a few of these take all of it, as where `maxModelLen` is all that a base of a long context
takes, slots that come to a thirty-second of it are granted all the same, as clients would queue for next to nothing;
but no more than half of what a single request leaves. The rest is for a larger KV cache, and for activations and CUDA's
context and graphs, which vLLM measures while it starts. What cannot start at all is told with its numbers: weights,
slots and the KV cache of a single request need more than there is
(`_check_enough_kv_cache_memory` in vllm/v1/core/kv_cache_utils.py ends vLLM then).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from components.core.capacity import (
    GIB,
    BaseSizes,
    Quantization,
    Slots,
    Unknown,
    slot_bytes,
    token_bytes,
    unshareable,
    weight_bytes,
)
from components.core.errors import UserError

# Whose allocations capacity.py counts.
VERSIONS = ((0, 32), (0, 33))
SLOTS_AT_MOST = 4
"""One part in so many of what the weights leave."""
REQUESTS_AT_LEAST = 4
TRIFLE = 32
"""One part in so many, too."""
REQUESTS_BY_DEFAULT = 256
"""How many requests share a batch without --max-num-seqs on a GPU under 70 GiB or an A100: `get_batch_defaults` in
vllm/engine/arg_utils.py (0.32.0). Others take 1024, but a slot takes time as well."""
GPUS_AT_MOST = 64
"""Beyond which nobody is told what is possible."""

# `gpu_memory_utilization` in vllm/config/cache.py (0.32.0, 0.33.0)
UTILIZATION = 0.92
# `ModelDType` in vllm/config/model.py, and the bytes of a number. `auto` makes float32 smaller (`_resolve_auto_dtype`).
DTYPES = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
_CACHED_NUMBERS = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

_STRANGE = "has a value that is not known here"
_COUNTED = frozenset(
    {
        "fully-sharded-loras",
        "kv-cache-dtype",
        "lora-dtype",
        "lora-target-modules",
        "quantization",
        "tensor-parallel-size",
    }
)
# They have such a word in their names, and change nothing there.
_HARMLESS = frozenset(
    {
        "chat-template-content-format",
        "cohere-format",
        "kv-cache-metrics",
        "kv-cache-metrics-sample",
        "kv-events-config",
        "per-request-spec-decode-metrics",
    }
)
# What is in the names of vLLM's other flags that change what lies on a GPU (vllm/engine/arg_utils.py).
_CHANGING = (
    "context",
    "format",
    "hf-",
    "kv-",
    "lora",
    "memory",
    "model-",
    "num-gpu",
    "offload",
    "parallel",
    "quant",
    "spec",
)


@dataclass(frozen=True)
class Memory:
    """What is known of the memory that an engine gets: of each GPU, and of what its base takes of it."""

    gpu_bytes: int
    base: BaseSizes | Unknown


@dataclass(frozen=True)
class Budget:
    """One GPU's bytes for an engine, and what takes them."""

    share: int
    weights: int
    slot: int
    """What one more adapter per batch takes."""
    request: int
    """The KV cache of one request of `tokens` tokens, which is `maxModelLen`."""
    tokens: int
    rank: int
    gpus: int = 1

    @property
    def most(self) -> int:
        """The most adapters per batch, by the rule; 0 where not even one keeps to it."""
        return max(0, self._due, self._trifle) // max(1, self.slot)

    @property
    def rule(self) -> str:
        """What so many slots do, as a clause."""
        if self._trifle > self._due:
            left = self.share - self.weights
            if self._trifle < left // TRIFLE:
                return "come to half of what a single request leaves"
            return "come to a thirty-second of what the weights leave"
        return "leave the KV cache its share"

    @property
    def _due(self) -> int:
        left = self.share - self.weights
        return min(left // SLOTS_AT_MOST, left - REQUESTS_AT_LEAST * self.request)

    @property
    def _trifle(self) -> int:
        left = self.share - self.weights
        return min(left // TRIFLE, (left - self.request) // 2)

    def at(self, rank: int) -> Budget:
        """The same with slots of another rank."""
        return replace(self, rank=rank, slot=self.slot * rank // self.rank)

    def fits(self, slots: int) -> bool:
        """Whether so many slots leave room for a single request."""
        return self.weights + slots * self.slot + self.request <= self.share

    def told(self, slots: int) -> str:
        """The sum, as a clause."""
        rest = self.share - self.weights - slots * self.slot
        return (
            f"{shown(self.weights)} of weights and {slots} × {shown(self.slot)} of slots leave {shown(rest)} of "
            f"{shown(self.share)}{self._each}"
        )

    @property
    def _each(self) -> str:
        return f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""

    def excess(self, slots: int) -> str:
        """What needs more than there is, as a clause."""
        taken = slots * self.slot
        counted = f"{slots} slots" if slots > 1 else "a slot"
        adapted = f", {counted} for adapters of rank {self.rank} ({shown(taken)})" if slots else ""
        needed = self.weights + taken + self.request
        more = f" ({shown(needed - self.share)} less)" if shown(needed) == shown(self.share) else ""
        return (
            f"weights of {shown(self.weights)}{adapted} and the KV "
            f"cache of one request of {self.tokens} tokens ({shown(self.request)}) need "
            f"{shown(needed)}, and vLLM gets {shown(self.share)}{more} of "
            f"{f'each of {self.gpus} GPUs' if self.gpus > 1 else 'the GPU'}"
        )


def budget_of(
    memory: Memory,
    rank: int,
    *,
    version: tuple[int, ...],
    max_model_len: int | None,
    utilization: float | None,
    dtype: str | None,
    targets: Collection[str] | None,
    arguments: Mapping[str, object],
) -> Budget | Unknown:
    """What an engine has of a GPU, by what its stack file says; `arguments` are its other flags in vLLM's spelling."""
    if version not in VERSIONS:
        return Unknown(f"what vLLM {'.'.join(map(str, version))} allocates is not known here")
    if isinstance(memory.base, Unknown):
        return memory.base
    _refuse_to_split(memory.base, rank, arguments)
    if max_model_len is None:
        return Unknown("engine.maxModelLen is not given")
    for name in arguments:
        if changing(name):
            return Unknown(f"what engine.args: {name} changes of it is not known here")
    base = memory.base
    if "quantization" in arguments and base.quantization is None:
        if arguments["quantization"] != "fp8":
            return Unknown("what a weight takes by engine.args: quantization is not known here")
        base = replace(base, quantization=Quantization(8))
    number_bytes = DTYPES.get(dtype or "auto")
    cached = arguments.get("kv-cache-dtype", "auto")
    cached_bytes = number_bytes if cached == "auto" else _CACHED_NUMBERS.get(str(cached))
    lora = arguments.get("lora-dtype", "auto")
    lora_bytes = number_bytes if lora == "auto" else DTYPES.get(str(lora))
    split = whole(arguments.get("tensor-parallel-size", 1))
    if number_bytes is None:
        return Unknown(f"engine.dtype {_STRANGE}")
    if cached_bytes is None:
        return Unknown(f"engine.args: kv-cache-dtype {_STRANGE}")
    if lora_bytes is None:
        return Unknown(f"engine.args: lora-dtype {_STRANGE}")
    if split is None:
        return Unknown(f"engine.args: tensor-parallel-size {_STRANGE}")
    sharded = arguments.get("fully-sharded-loras") is True
    slot = slot_bytes(base, Slots(rank, lora_bytes, split, sharded, targets))
    weights = weight_bytes(base, number_bytes, split)
    token = token_bytes(base, cached_bytes, split)
    if isinstance(slot, Unknown):
        return slot
    if isinstance(weights, Unknown):
        return weights
    if isinstance(token, Unknown):
        return token
    share = int(memory.gpu_bytes * (UTILIZATION if utilization is None else utilization))
    return Budget(share, weights, slot, max_model_len * token, max_model_len, rank, split)


def _refuse_to_split(base: BaseSizes, rank: int, arguments: Mapping[str, object]) -> None:
    """Raises UserError for what vLLM surely cannot share among several GPUs: of the base, or of the slots (`divide` in
    vllm/lora/layers/base_linear.py)."""
    split = whole(arguments.get("tensor-parallel-size", 1)) or 1
    what = None if overriding(arguments) else unshareable(base, split)
    if what is not None:
        possible = ", ".join(str(number) for number in range(1, GPUS_AT_MOST + 1) if unshareable(base, number) is None)
        raise UserError(
            f"engine.args: tensorParallelSize is {split}, and vLLM cannot share the base's {what} among so many GPUs; "
            f"among how many it can: {possible}"
        )
    if arguments.get("fully-sharded-loras") is True and rank % split:
        raise UserError(
            f"engine.args: fullyShardedLoras shares rank {rank} among {split} GPUs, which do not divide it; set "
            "engine.maxLoraRank to one that they divide, or leave fullyShardedLoras out"
        )


def overriding(names: Iterable[str]) -> bool:
    """Whether one of these flags gives vLLM another config of the base than its config.json."""
    return any(name.startswith(("hf-", "config-f")) for name in names)


def changing(name: str) -> bool:
    """Whether a flag changes what lies on a GPU in a way that is not counted here."""
    return name not in _COUNTED | _HARMLESS and any(part in name for part in _CHANGING)


def shown(amount: int) -> str:
    """Bytes as people compare them: `15.0 GiB`, `88 MiB`."""
    return f"{amount / GIB:.1f} GiB" if abs(amount) >= GIB else f"{amount / 1024**2:.0f} MiB"


def whole(value: object) -> int | None:
    """A positive whole number, as Pulumi's configuration or whoever wrote it may have it: 4, 4.0, "4"."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
