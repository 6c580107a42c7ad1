"""How much of a GPU's memory an engine takes: its weights, its LoRA slots, and the KV cache of a token.

vLLM allocates the slots of all adapters that may share a batch while it starts, each at the largest rank. What is
counted here was read in vLLM 0.32.0 and is the same in 0.33.0; tests/e2e/test_contract_capacity.py lets vLLM allocate
and compares the bytes. All is per GPU. What cannot be counted is `Unknown`, with why, and never a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

GIB = 1024**3
# DEFAULT_VOCAB_PADDING_SIZE in vllm/model_executor/layers/vocab_parallel_embedding.py
VOCAB_PADDING = 64
# LogitsProcessorWithLoRA.create_lora_weights in vllm/lora/layers/logits_processor.py
LARGEST_ADAPTED_VOCAB = 258048

# What vLLM holds as one module, and what it is called there: `packed_modules_mapping` of its model classes.
PACKED = (
    ("qkv_proj", frozenset({"q_proj", "k_proj", "v_proj"})),
    ("gate_up_proj", frozenset({"gate_proj", "up_proj"})),
    ("gate_up_proj", frozenset({"c_fc_0", "c_fc_1"})),
    ("gate_up_proj", frozenset({"w1", "w3"})),
)

Kind: TypeAlias = Literal["column", "row", "whole", "embedding", "output"]


@dataclass(frozen=True)
class Unknown:
    """An amount that cannot be counted; `reason` is a clause."""

    reason: str


@dataclass(frozen=True)
class Matrix:
    """One matrix of a base, and how many of it there are."""

    name: str
    """The last part of its module's name."""
    inputs: int
    outputs: int
    kind: Kind = "column"
    """What tensor parallelism splits: the outputs, the inputs, or nothing. `output` is what makes logits."""
    count: int = 1
    keys: int = 0
    """How many of the outputs are keys and values: there are fewer heads of them, which GPUs may have to share."""
    adapted: bool = True
    """Whether vLLM takes LoRA for it."""


@dataclass(frozen=True)
class Quantization:
    """What a quantised weight takes: its own bits, and for each group of weights those of scale and zero point."""

    bits: int
    group_bits: int = 0
    group_size: int = 1


@dataclass(frozen=True)
class BaseSizes:
    """A base as a sum of matrices. Vectors (norms, biases), under a thousandth of a real model, are left out."""

    matrices: tuple[Matrix, ...]
    layers: int
    tied: bool
    """Whether logits are made with the embedding's own matrix."""
    heads: int | None = None
    key_heads: int | None = None
    key_width: int | Unknown = Unknown("the width of its keys is not known")
    """How many numbers the keys of one token have in one layer; its values have as many."""
    quantization: Quantization | Unknown | None = None


@dataclass(frozen=True)
class Slots:
    """What decides about the slots of an engine beside the base: flags of vLLM."""

    rank: int
    number_bytes: int = 2
    tensor_parallel: int = 1
    fully_sharded: bool = False
    targets: Collection[str] | None = None
    """--lora-target-modules."""


def slot_bytes(base: BaseSizes, slots: Slots) -> int | Unknown:
    """The bytes that one more adapter per batch takes: A and B of every adapted module at the largest rank.

    vllm/lora/layers/: base_linear.py and column_parallel_linear.py (a slice per part of a packed module),
    row_parallel_linear.py, vocab_parallel_embedding.py and logits_processor.py (never split).
    """
    split = slots.tensor_parallel
    problem = _indivisible(base, split)
    if problem is None and slots.fully_sharded and slots.rank % split:
        problem = f"rank {slots.rank} cannot be shared by {split} GPUs"
    if problem is not None:
        return Unknown(problem)
    chosen = _chosen(base, slots.targets)
    if isinstance(chosen, Unknown):
        return chosen
    numbers = 0
    for matrix in chosen:
        if matrix.kind == "output" and matrix.outputs > LARGEST_ADAPTED_VOCAB:
            return Unknown(f"vLLM adapts no output of more than {LARGEST_ADAPTED_VOCAB} tokens")
        inputs, outputs = _share(base, matrix, split)
        rank_of_a = slots.rank
        if matrix.kind in ("embedding", "output"):
            inputs, outputs = matrix.inputs, matrix.outputs
        elif slots.fully_sharded and matrix.kind == "column":
            rank_of_a = slots.rank // split
        elif slots.fully_sharded and matrix.kind == "row":
            outputs = matrix.outputs // split
        numbers += matrix.count * (rank_of_a * inputs + slots.rank * outputs)
    return numbers * slots.number_bytes


def weight_bytes(base: BaseSizes, number_bytes: int, tensor_parallel: int = 1) -> int | Unknown:
    """The bytes of the base's matrices; embedding and output are padded, and not quantised."""
    problem = _indivisible(base, tensor_parallel)
    if problem is not None:
        return Unknown(problem)
    if isinstance(base.quantization, Unknown):
        return base.quantization
    bits = 0
    for matrix in base.matrices:
        if matrix.kind == "output" and base.tied:
            continue
        inputs, outputs = _share(base, matrix, tensor_parallel)
        quantized = base.quantization if matrix.kind not in ("embedding", "output") else None
        if quantized is None:
            bits += matrix.count * inputs * outputs * number_bytes * 8
        else:
            groups = -(-inputs // quantized.group_size)
            bits += matrix.count * outputs * (inputs * quantized.bits + groups * quantized.group_bits)
    return bits // 8


def token_bytes(base: BaseSizes, number_bytes: int, tensor_parallel: int = 1) -> int | Unknown:
    """The bytes that the KV cache holds for one token: `page_size_bytes` of vllm/v1/kv_cache_interface.py over its
    `block_size`, in every layer."""
    problem = _indivisible(base, tensor_parallel)
    if problem is not None:
        return Unknown(problem)
    if isinstance(base.key_width, Unknown):
        return base.key_width
    return 2 * base.layers * _shared_keys(base, base.key_width, tensor_parallel) * number_bytes


def unshareable(base: BaseSizes, split: int) -> str | None:
    """What of the base vLLM refuses to share among so many GPUs; None where there is nothing that is known.

    `verify_with_parallel_config` of vllm/config/model.py for its heads; QKVParallelLinear of
    vllm/model_executor/layers/linear.py, which also gives a head of keys to several GPUs; `divide` of the same file and
    of vocab_parallel_embedding.py.
    """
    if base.heads is not None and base.heads % split:
        return f"{base.heads} attention heads"
    if base.key_heads is not None and base.key_heads % split and split % base.key_heads:
        return f"{base.key_heads} heads of keys"
    for matrix in base.matrices:
        if matrix.kind == "row" and matrix.inputs % split:
            return f"{matrix.name} ({matrix.inputs} inputs)"
        if matrix.kind == "column" and (matrix.outputs - matrix.keys) % split:
            return f"{matrix.name} ({matrix.outputs - matrix.keys} outputs)"
        vocab = {"embedding": matrix.inputs, "output": matrix.outputs}.get(matrix.kind, 0)
        if _padded(vocab) % split:
            return f"vocabulary of {_padded(vocab)} tokens"
    return None


def _indivisible(base: BaseSizes, split: int) -> str | None:
    """Why vLLM would not share the base among so many GPUs, or why nobody can tell."""
    if split == 1:
        return None
    if base.heads is None or base.key_heads is None:
        return "the numbers of its heads, which several GPUs share, are not known"
    what = unshareable(base, split)
    return f"its {what} cannot be shared by {split} GPUs" if what else None


def _share(base: BaseSizes, matrix: Matrix, split: int) -> tuple[int, int]:
    """Inputs and outputs of the part of a matrix that one GPU holds."""
    if matrix.kind == "column":
        keys = _shared_keys(base, matrix.keys, split)
        return matrix.inputs, (matrix.outputs - matrix.keys) // split + keys
    if matrix.kind == "row":
        return matrix.inputs // split, matrix.outputs
    if matrix.kind == "embedding":
        return _padded(matrix.inputs) // split, matrix.outputs
    if matrix.kind == "output":
        return matrix.inputs, _padded(matrix.outputs) // split
    return matrix.inputs, matrix.outputs


def _shared_keys(base: BaseSizes, keys: int, split: int) -> int:
    # QKVParallelLinear in vllm/model_executor/layers/linear.py: a head of keys is the least that a GPU holds.
    return keys // min(split, base.key_heads) if base.key_heads else keys


def _padded(vocab: int) -> int:
    return -(-vocab // VOCAB_PADDING) * VOCAB_PADDING


def _chosen(base: BaseSizes, targets: Collection[str] | None) -> list[Matrix] | Unknown:
    """The matrices that get slots: `_create_lora_modules` of vllm/lora/model_manager.py."""
    if targets is None:
        return [matrix for matrix in base.matrices if matrix.adapted]
    known = {name: matrix for matrix in base.matrices for name in _names(matrix.name)}
    for target in sorted(targets):
        if target not in known or not known[target].adapted:
            return Unknown(f"what --lora-target-modules {target} stands for is not known")
    # One part of a packed module brings the others.
    reached = {name for target in targets for name in _names(target)}
    return [matrix for matrix in base.matrices if not reached.isdisjoint(_names(matrix.name))]


def _names(name: str) -> Iterator[str]:
    """The name of a module, and of the one that vLLM packs it into, if it does."""
    yield name
    yield from (packed for packed, parts in PACKED if name in parts)
