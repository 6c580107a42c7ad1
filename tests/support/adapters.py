"""Small PEFT adapters, written byte by byte: no torch, and every byte known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HIDDEN = 16


def write_adapter(
    directory: Path, seed: int = 0, rank: int = 8, base: str = "base/model", config: dict[str, Any] | None = None
) -> Path:
    """Write an adapter on q_proj and v_proj of two layers. A seed stands for its bytes; all have one size."""
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "modules_to_save": None,
        **(config or {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(safetensors(lora_shapes(rank), seed))
    return directory


def lora_shapes(rank: int) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for layer in (0, 1):
        for module in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes[f"{stem}.lora_A.weight"] = [rank, HIDDEN]
            shapes[f"{stem}.lora_B.weight"] = [HIDDEN, rank]
    return shapes


def safetensors(shapes: dict[str, list[int]], seed: int) -> bytes:
    """A safetensors file of float32 tensors with pseudo-random bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (rows, columns) in shapes.items():
        end = offset + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(offset)
