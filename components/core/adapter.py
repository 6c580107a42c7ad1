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
from components.core.lora_names import Side, lora_module
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
    matrices = [(*found, tensor) for name, tensor in tensors.items() if (found := lora_module(name)) is not None]
    return Adapter(
        directory=files.directory,
        config=files.config,
        weights=files.weights,
        rank=max((1, *_config_ranks(config), *_row_counts(matrices))),
        modules=tuple(sorted(set(_last_parts(module for module, _, _ in matrices)))),
        parameters=sum(tensor.elements for _, _, tensor in matrices),
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


def _last_parts(modules: Iterable[str]) -> Iterator[str]:
    for module in modules:
        # PEFT's name for the first of two fused expert matrices: lora_model.py, check_unexpected_modules.
        last = module.removesuffix(".base_layer").rsplit(".", 1)[-1]
        if last:
            yield printable(last, limit=80)


def _row_counts(matrices: Iterable[tuple[str, Side, Tensor]]) -> Iterator[int]:
    for module, side, tensor in matrices:
        # Fused experts stack every expert's rows in one matrix: vllm/lora/model_manager.py reshapes them to
        # (experts, rank, width), so that the rows say nothing about the rank.
        if side == "A" and len(tensor.shape) >= 2 and not module.removesuffix(".base_layer").endswith(".experts"):
            yield tensor.shape[0]
