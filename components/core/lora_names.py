"""The names of LoRA matrices as vLLM reads them: vllm/lora/utils.py (0.32.0), `parse_fine_tuned_lora_name`.

A LoRA matrix ends in `.lora_A.weight`, `.lora_B.weight`, `.lora_embedding_A` or `.lora_embedding_B`.
`base_model.model.` is cut off wherever it stands, if the name starts with it; a name without it is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["A", "B"]

PEFT_PREFIX = "base_model.model."

_SIDES: Mapping[str, Side] = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}


def lora_module(name: str) -> tuple[str, Side] | None:
    """The module a LoRA matrix belongs to, as vLLM reads its name; None for what is no LoRA matrix."""
    for ending, side in _SIDES.items():
        if name.endswith(ending):
            module = name[: -len(ending)]
            return (module.replace(PEFT_PREFIX, "") if name.startswith(PEFT_PREFIX) else module), side
    return None
