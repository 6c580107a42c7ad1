"""Adapters as large as real ones that take no room: the header is whole, the tensors are a hole in the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LAYERS = 32
RANK = 32
# Llama 3.1 8B: inputs and outputs of what PEFT calls all-linear; 32 layers of 7 modules of 2 tensors are 448.
MODULES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
CONFIG = {
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
    "lora_alpha": 2 * RANK,
    "peft_type": "LORA",
    "r": RANK,
    "target_modules": [name.split(".")[1] for name in MODULES],
    "task_type": "CAUSAL_LM",
}


def large_adapters(directory: Path, count: int) -> list[Path]:
    """`count` adapters of 448 tensors and 160 MiB each, in folders of `directory`."""
    tensors: dict[str, object] = {}
    position = 0
    for layer in range(LAYERS):
        for module, (inputs, outputs) in MODULES.items():
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
            file.truncate(8 + len(header) + position)
    return made
