"""What the check of an adapter finds: one fault or doubt each, and how all of them are told together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from components.core.errors import UserError

Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, order=True)
class Finding:
    """One thing found in an adapter. Sorted by file, errors first.

    Every text in it is fit for a terminal. `message` says what was found, what is accepted and what to do, and names no
    file, so that the same finding in many adapters can be told once.
    """

    path: str
    """The file, or the adapter's directory, as the caller named it."""
    severity: Severity
    rule: str
    """A short name that stays: `dora`, `wrong-base`."""
    subject: str
    """The key or the tensor; empty where the file as a whole is meant."""
    message: str

    def __str__(self) -> str:
        where = f"{self.path}: {self.subject}" if self.subject else self.path
        return f"{where}: {self.message}"


class FaultError(UserError):
    """What keeps an adapter from being read at all, as an error and as a finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def fault(path: str, rule: str, message: str) -> FaultError:
    """The error to raise for a fault of a whole file or directory."""
    return FaultError(Finding(path, "error", rule, "", message))
