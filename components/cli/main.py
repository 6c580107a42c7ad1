"""`lora`: finds the subcommand, loads that one alone, and ends with one line where something is wrong.

Exit codes: 0 fine, 1 errors were found, 2 the command was given something wrong, 130 Ctrl-C, 141 nobody reads on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from components.core.errors import UserError, os_reason, printable, printable_text

COMMANDS = {
    "check": ("components.cli.check", "check adapters: what vLLM would refuse, or silently get wrong"),
    "gc-store": ("components.cli.gc_store", "list, or remove, what a store holds and nothing refers to"),
    "lock": ("components.cli.lock", "write what the adapters of a stack are to its lock file"),
    "new-stack": ("components.cli.new_stack", "make the stack file of another client"),
    "push": ("components.cli.push", "send the adapters of a stack to its store"),
    "rollback": ("components.cli.rollback", "put back what an engine served before its last activation"),
    "status": ("components.cli.status", "show how the pods of a stack stand: reached, serving, drifted"),
}
INTERRUPTED, NOBODY_READS = 130, 141


class Command(Protocol):
    """What each module of a subcommand has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        # Loaded for this alone: finding the installed packages takes longer than the rest of the start.
        from importlib.metadata import version

        print(f"lora-pods {version('lora-pods')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lora` with these arguments, those of the process by default; returns the exit code."""
    if sys.stdout is None or sys.stderr is None:  # closed by whoever started it
        return NOBODY_READS
    for stream in (sys.stdout, sys.stderr):
        # A terminal that is not UTF-8 gets escapes instead of an encoding error.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"lora: {printable_text(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _silence()
        return NOBODY_READS
    except OSError as error:
        _silence()
        what = f"{printable(error.filename)}: " if error.filename else ""
        print(f"lora: {what}{os_reason(error)}", file=sys.stderr)
        return 2


def _silence() -> None:
    """Python flushes once more as it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lora", description="What lora-pods offers outside of pulumi.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    command: Command | None = None
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        if name == asked:
            command = cast("Command", import_module(module))
            command.add_arguments(subparser)
    args = parser.parse_args(words)
    assert command  # what was parsed is what was asked for
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())
