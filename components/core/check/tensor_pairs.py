"""The tensors of an adapter as pairs of matrices, read by their names as vLLM reads them, and how they are told of.

vllm/lora/utils.py (0.32.0), `parse_fine_tuned_lora_name`: a LoRA matrix ends in `.lora_A.weight`, `.lora_B.weight`,
`.lora_embedding_A` or `.lora_embedding_B`. `base_model.model.` is cut off wherever it stands, if the name starts with
it; a name without it is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from components.core.errors import printable
from components.core.findings import Finding, Severity
from components.core.safetensors_header import Tensor

Side: TypeAlias = Literal["A", "B"]

PEFT_PREFIX = "base_model.model."
NAMES_SHOWN = 3
NAME_SHOWN_CHARACTERS = 120

_SIDES: Mapping[str, Side] = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}


@dataclass
class Pair:
    """The two matrices of one module: each with the names it has in the file, of which there should be one."""

    module: str
    a: list[tuple[str, Tensor]] = field(default_factory=list)
    b: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def matrices(self) -> list[tuple[str, Tensor]]:
        return [*self.a, *self.b]

    @property
    def is_experts(self) -> bool:
        """Matrices of experts, which vLLM takes in shapes of their own: vllm/lora/model_manager.py."""
        return ".experts" in self.module or self.module.startswith("experts")


@dataclass
class Group:
    """What one finding is about: the names, and something to say of the first."""

    names: list[str] = field(default_factory=list)
    detail: str = ""

    def add(self, name: str, detail: str = "") -> None:
        if not self.names:
            self.detail = detail
        self.names.append(name)


def lora_module(name: str) -> tuple[str, Side] | None:
    """The module a LoRA matrix belongs to, as vLLM reads its name; None for what is no LoRA matrix."""
    for ending, side in _SIDES.items():
        if name.endswith(ending):
            module = name[: -len(ending)]
            return (module.replace(PEFT_PREFIX, "") if name.startswith(PEFT_PREFIX) else module), side
    return None


def endings(module: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    yield module
    position = module.find(".")
    while position >= 0:
        yield module[position + 1 :]
        position = module.find(".", position + 1)


def last_part(module: str) -> str:
    return module.rpartition(".")[2]


def told(place: str, severity: Severity, rule: str, names: Sequence[str], message: str) -> Finding:
    """A finding about the file `place`; the first of `names`, if any, is its subject."""
    return Finding(place, severity, rule, shown(names[0]) if names else "", message)


def shown(name: str) -> str:
    return printable(name, limit=NAME_SHOWN_CHARACTERS)


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(shown(name) for name in names[:NAMES_SHOWN])
    return text if len(names) <= NAMES_SHOWN else f"{text} and {len(names) - NAMES_SHOWN} more"


def share(names: Sequence[str], total: int) -> str:
    """`all 8`, `3 of 8`."""
    return f"all {total}" if len(names) == total else f"{len(names)} of {total}"
