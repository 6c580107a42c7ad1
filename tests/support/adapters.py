"""Small adapters on disk for tests: real files, no tensor library."""

import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

CONFIG: Mapping[str, Json] = {
    "base_model_name_or_path": "example/base",
    "lora_alpha": 16,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
}
# The config.json of a base that `seeded_adapter`'s adapters fit.
BASE_CONFIG: Mapping[str, Json] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
WIDTHS = {"F16": 2, "BF16": 2, "F32": 4}


def tensor_name(module: str, side: str, layer: int = 0) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight"


def lora_shapes(rank: int = 4, width: int = 8, modules: Sequence[str] = ("q_proj", "v_proj")) -> dict[str, list[int]]:
    """Names and shapes of an A and a B matrix for every module: (rank, width) and (width, rank)."""
    shapes: dict[str, list[int]] = {}
    for module in modules:
        shapes[tensor_name(module, "A")] = [rank, width]
        shapes[tensor_name(module, "B")] = [width, rank]
    return shapes


def safetensors_bytes(shapes: Mapping[str, Sequence[int]], dtype: str = "F32", fill: int = 0) -> bytes:
    header: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        size = WIDTHS[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    return with_header(json.dumps(header).encode(), bytes([fill]) * position)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def write_adapter(
    directory: Path,
    config: Mapping[str, Json] | bytes = CONFIG,
    weights: Mapping[str, Sequence[int]] | bytes | None = None,
) -> Path:
    """Writes both files (bytes as they are, mappings in their format) and gives the directory back."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = lora_shapes() if weights is None else weights
    (directory / "adapter_config.json").write_bytes(
        config if isinstance(config, bytes) else json.dumps(config).encode()
    )
    (directory / "adapter_model.safetensors").write_bytes(
        shapes if isinstance(shapes, bytes) else safetensors_bytes(shapes)
    )
    return directory


def filled_adapter(directory: Path, fill: int, mebibytes: int) -> Path:
    """An adapter of so many MiB, every byte of whose tensors is `fill`."""
    rank, columns = 8, mebibytes * 8192  # two A and two B of rank x columns x 4 bytes
    return write_adapter(directory, {**CONFIG, "r": rank}, safetensors_bytes(lora_shapes(rank, columns), fill=fill))


def seeded_adapter(directory: Path, seed: int = 0, rank: int = 8, config: Mapping[str, Json] | None = None) -> Path:
    """An adapter whose bytes a seed stands for; whatever the seed, the size is the same."""
    empty = safetensors_bytes(lora_shapes(rank, width=16))
    header = empty[: 8 + int.from_bytes(empty[:8], "little")]
    tensors = random.Random(seed).randbytes(len(empty) - len(header))
    write_adapter(directory, {**CONFIG, "r": rank, **(config or {})})
    (directory / "adapter_model.safetensors").write_bytes(header + tensors)
    return directory
