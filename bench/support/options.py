"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`repeat` is how often each thing is done; `quick` does less of it, to see that it works at all."""

    repeat: int
    quick: bool

    @property
    def large_adapters(self) -> int:
        """How many adapters of 160 MB a stack has."""
        return 3 if self.quick else 10
