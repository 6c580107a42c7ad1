"""The tensors of an adapter as pairs of matrices, and how they are told of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from components.core.errors import printable
from components.core.findings import Finding, Severity
from components.core.listing import listed_names
from components.core.safetensors_header import Tensor

NAMES_SHOWN = 3
NAME_SHOWN_CHARACTERS = 120
# The longest names of public bases have a dozen parts.
LONGEST_ENDING = 32


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
    def is_embedding(self) -> bool:
        return any(name.endswith(("lora_embedding_A", "lora_embedding_B")) for name, _ in self.matrices)

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


def endings(module: str) -> Iterator[str]:
    """`c`, `b.c`, `a.b.c`, of at most `LONGEST_ENDING` parts: all endings of a name are the square of it."""
    position = len(module)
    for _ in range(LONGEST_ENDING):
        position = module.rfind(".", 0, position)
        yield module[position + 1 :]
        if position < 0:
            return


def last_part(module: str) -> str:
    return module.rpartition(".")[2]


def told(place: str, severity: Severity, rule: str, names: Sequence[str], message: str) -> Finding:
    """A finding about the file `place`; the first of `names`, if any, is its subject."""
    return Finding(place, severity, rule, shown(names[0]) if names else "", message)


def shown(name: str) -> str:
    return printable(name, limit=NAME_SHOWN_CHARACTERS)


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return listed_names(names, NAMES_SHOWN, NAME_SHOWN_CHARACTERS)


def share(names: Sequence[str], total: int) -> str:
    """`all 8`, `3 of 8`."""
    return f"all {total}" if len(names) == total else f"{len(names)} of {total}"
