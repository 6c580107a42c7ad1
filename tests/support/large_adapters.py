"""Adapters as large as real ones: the header is whole, the tensors are a hole in the file, or random bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

LAYERS = 32
RANK = 32
# Inputs and outputs of what PEFT calls all-linear; 32 layers of 7 modules of 2 tensors are 448. Llama 3.1 8B:
MODULES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
LLAMA_2 = {
    **{f"self_attn.{name}_proj": (4096, 4096) for name in "qkvo"},
    **{f"mlp.{name}_proj": (4096, 11008) for name in ("gate", "up")},
    "mlp.down_proj": (11008, 4096),
}
CONFIG = {
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
    "lora_alpha": 2 * RANK,
    "peft_type": "LORA",
    "r": RANK,
    "target_modules": [name.split(".")[1] for name in MODULES],
    "task_type": "CAUSAL_LM",
}


def large_adapters(
    directory: Path, count: int, modules: Mapping[str, tuple[int, int]] = MODULES, random_bytes: bool = False
) -> list[Path]:
    """`count` adapters of 448 tensors and 160 MiB each (160 MB of `LLAMA_2`), in folders of `directory`.

    They take no room unless the tensors are `random_bytes`.
    """
    tensors: dict[str, object] = {}
    position = 0
    for layer in range(LAYERS):
        for module, (inputs, outputs) in modules.items():
            for side, shape in (("A", [RANK, inputs]), ("B", [outputs, RANK])):
                end = position + 2 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
                tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
                position = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    made = [directory / f"client-{number:03}" for number in range(count)]
    for adapter in made:
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        with (adapter / "adapter_model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            if random_bytes:
                for begin in range(0, position, 2**20):
                    file.write(os.urandom(min(2**20, position - begin)))
            else:
                file.truncate(8 + len(header) + position)
    return made
