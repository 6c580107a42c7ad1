"""What a PEFT (LoRA) adapter directory holds, read without reading a tensor.

An adapter is read as long as its two files can be made sense of. Whether vLLM would serve it is for `adapter_check` to
say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core.adapter_config import read_config
from components.core.adapter_files import (
    CONFIG_NAME,
    ENTRIES_LOOKED_AT,
    WEIGHTS_NAME,
    AdapterFiles,
    locate_adapter,
    open_regular,
    shown_path,
)
from components.core.errors import printable
from components.core.json_text import as_object
from components.core.safetensors_header import Tensor, read_tensors

__all__ = [
    "CONFIG_NAME",
    "ENTRIES_LOOKED_AT",
    "WEIGHTS_NAME",
    "Adapter",
    "AdapterFiles",
    "Tensor",
    "locate_adapter",
    "open_regular",
    "read_adapter",
    "read_located",
    "shown_path",
]


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter whose config and safetensors header can be read."""

    directory: Path
    """As the caller named it."""
    config: Path
    """The real `adapter_config.json`, links resolved."""
    weights: Path
    """The real `adapter_model.safetensors`, links resolved."""
    rank: int
    """The largest rank anywhere: `r`, `rank_pattern`, and the rows of every LoRA A matrix; at least 1."""
    modules: tuple[str, ...]
    """Sorted last parts of the names of the modules that have LoRA matrices, for example `q_proj`; terminal-safe."""
    parameters: int
    """Number of elements in all LoRA matrices."""
    base: str | None
    """`base_model_name_or_path` as the trainer wrote it: foreign text, possibly somebody's private path."""


def read_adapter(directory: Path) -> Adapter:
    """Reads the config and the header of the weights; never a tensor.

    Raises:
        UserError: a file is missing, cannot be read or is not what its name says.
    """
    return read_located(locate_adapter(directory))


def read_located(files: AdapterFiles) -> Adapter:
    """`read_adapter` of files that were located before: exactly those, whatever the directory holds by now."""
    config = read_config(files.config, shown_path(files.directory / CONFIG_NAME))
    tensors = read_tensors(files.weights, shown_path(files.directory / WEIGHTS_NAME))
    matrices = {name: tensor for name, tensor in tensors.items() if _lora_module(name) is not None}
    return Adapter(
        directory=files.directory,
        config=files.config,
        weights=files.weights,
        rank=max((1, *_config_ranks(config), *_row_counts(matrices))),
        modules=tuple(sorted(set(_last_parts(matrices)))),
        parameters=sum(tensor.elements for tensor in matrices.values()),
        base=_base_name(config),
    )


def rank_of(value: object) -> int | None:
    """`value` if it can be a rank: a whole number from 1 (`true` is none)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _config_ranks(config: Mapping[str, object]) -> Iterator[int]:
    pattern = as_object(config.get("rank_pattern")) or {}
    for value in (config.get("r"), *pattern.values()):
        if rank := rank_of(value):
            yield rank


def _base_name(config: Mapping[str, object]) -> str | None:
    base = config.get("base_model_name_or_path")
    # JSON can write a lone surrogate, and UTF-8 cannot.
    if not isinstance(base, str) or not base or any("\ud800" <= char <= "\udfff" for char in base):
        return None
    return base


def _lora_module(name: str) -> str | None:
    """The module a LoRA tensor belongs to; None for a tensor that is no LoRA matrix.

    vllm/lora/utils.py (0.32.0), parse_fine_tuned_lora_name.
    """
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) >= 2 and parts[-2] in ("lora_A", "lora_B"):
        return ".".join(parts[:-2])
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[:-1])
    return None


def _last_parts(matrices: Iterable[str]) -> Iterator[str]:
    for name in matrices:
        # PEFT's name for the first of two fused expert matrices: lora_model.py, check_unexpected_modules.
        last = (_lora_module(name) or "").removesuffix(".base_layer").rsplit(".", 1)[-1]
        if last:
            yield printable(last, limit=80)


def _row_counts(matrices: Mapping[str, Tensor]) -> Iterator[int]:
    for name, tensor in matrices.items():
        module = (_lora_module(name) or "").removesuffix(".base_layer")
        # Fused experts stack every expert's rows in one matrix: vllm/lora/model_manager.py reshapes them to
        # (experts, rank, width), so that the rows say nothing about the rank.
        if (
            len(tensor.shape) >= 2
            and name.endswith((".lora_A.weight", ".lora_embedding_A"))
            and not module.endswith(".experts")
        ):
            yield tensor.shape[0]
