"""Lines on Pulumi's console that show how far long work is, and are gone once it is done.

Pulumi calls such a line ephemeral: its table shows it beside the resource as long as nothing else is to be said of it.
Where the console is no terminal, it writes out each of them as a line for good (`rowUpdated` in
pkg/backend/display/jsonmessage.go, 3.274.1), and so does `--diff`; so nothing is said there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from components.core.errors import printable
from components.core.meter import Say

_ANCESTORS = 8
# What takes its table from Pulumi, or its terminal.
_TABLELESS = frozenset({"--diff", "--json", "-j", "--non-interactive", "--suppress-progress"})
_NO = ("false", "f", "0")
# Every flag may be a variable too (pkg/cmd/pulumi/pulumi.go, 3.274.1).
_TABLELESS_VARIABLES = (
    *("PULUMI_OPTION_DIFF", "PULUMI_OPTION_JSON"),
    *("PULUMI_OPTION_NON_INTERACTIVE", "PULUMI_OPTION_SUPPRESS_PROGRESS"),
)


@cache
def program_says() -> Say | None:
    """Says a line beside the stack, from Pulumi's program; None where nobody watches."""
    if not watched():
        return None
    import pulumi

    return _patient(lambda line: pulumi.log.info(line, ephemeral=True))


def provider_says() -> Say | None:
    """Says a line beside the resource that this thread works on, from a dynamic provider; None where nobody watches.

    It has to be asked for on the thread that Pulumi called, before any other.
    """
    if not watched():
        return None
    log = _engine_log()
    urn = _urn()
    return _patient(lambda line: log(urn, line)) if log else None


@cache
def watched(proc: Path = Path("/proc")) -> bool:
    """Whether the console of the pulumi that runs this is a terminal on which it draws its table.

    Pulumi does not tell; on Linux its process does. Elsewhere nobody is taken to watch.
    """
    if _on_ci(os.environ) or os.environ.get("TERM", "").lower() == "dumb":
        return False
    if any(os.environ.get(name, "0").lower() not in _NO for name in _TABLELESS_VARIABLES):
        return False
    try:
        pulumi = _pulumi(proc, os.getpid())
        if pulumi is None:
            return False
        words = (pulumi / "cmdline").read_text("utf-8", "replace").split("\0")
        given = (word.partition("=") for word in words)
        if any(flag in _TABLELESS and value.lower() not in _NO for flag, _, value in given):
            return False
        return all(str((pulumi / "fd" / end).readlink()).startswith(("/dev/pts/", "/dev/tty")) for end in "01")
    except (OSError, ValueError, IndexError):
        return False


def _on_ci(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for name in ("CI", "GITHUB_ACTIONS", "BUILD_ID", "TF_BUILD"))


def _pulumi(proc: Path, pid: int) -> Path | None:
    """The nearest ancestor that is pulumi itself."""
    for _ in range(_ANCESTORS):
        # A program's name stands in parentheses and may hold any of them.
        name, rest = (proc / str(pid) / "stat").read_text("utf-8", "replace").partition("(")[2].rsplit(")", 1)
        if name == "pulumi":
            return proc / str(pid)
        pid = int(rest.split()[1])
        if pid <= 1:
            break
    return None


def _patient(say: Say) -> Say:
    """Says one line at a time, and nothing more once that failed: no work may end for want of a line."""
    lock, broken = Lock(), False

    def patiently(line: str) -> None:
        nonlocal broken
        with lock:
            if not broken:
                try:
                    say(printable(line))
                except Exception:
                    broken = True

    return patiently


@cache
def _engine_log() -> Callable[[str, str], None] | None:
    """The log of the engine that started this provider, whose address is its only argument."""
    if len(sys.argv) != 2:
        return None
    import grpc  # type: ignore[import-untyped]
    from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc

    engine = engine_pb2_grpc.EngineStub(grpc.insecure_channel(sys.argv[1]))

    def log(urn: str, line: str) -> None:
        engine.Log(engine_pb2.LogRequest(severity=engine_pb2.INFO, message=line, urn=urn, ephemeral=True), timeout=5)

    return log


def _urn() -> str:
    """The resource that Pulumi's own frames of this thread work on; "", which is the stack, where they do not tell.

    A provider is not told (pulumi/dynamic/__main__.py, SDK 3.272): the request stays with who calls it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        urn = getattr(frame.f_locals.get("request"), "urn", None)
        if isinstance(urn, str):
            return urn
        frame = frame.f_back
    return ""
