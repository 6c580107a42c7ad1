"""`./dev bench [NAME…] [--repeat N] [--quick]`: runs programs of this directory and prints a table for each."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bench.support.machine import machine
from bench.support.options import Options

PROGRAMS = (
    *("preview_unchanged", "preview_many", "updates", "slow_link", "digests", "engine_ready", "serving"),
    "lora_check",
)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description="Measures what this project promises about speed, side by side with what else does the same.",
        epilog=f"NAME is one of: {', '.join(PROGRAMS)}; all of them if none is given.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--repeat", type=int, metavar="N", help="how often each thing is done (5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer, to see that it works")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the tables to a file too")
    parser.add_argument("--images", action="store_true", help="only say which images the programs need")
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in PROGRAMS]:
        parser.error(f"no program named {unknown[0]}; there are {', '.join(PROGRAMS)}")
    if given.repeat is not None and given.repeat < 1:
        parser.error("--repeat takes a number from 1 on")
    names = given.names or PROGRAMS
    programs = {name: importlib.import_module(f"bench.{name}") for name in names}
    if given.images:
        print(*sorted({image for program in programs.values() for image in program.IMAGES}))
        return 0
    # Whatever ends this, the pods and the directories go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = Options(given.repeat or (1 if given.quick else 5), given.quick)
    failed = []
    for name, program in programs.items():
        try:
            text = measured(name, program, options)
        except Exception as error:
            # Hours of the others' work are not to be lost for one.
            traceback.print_exc()
            sys.stderr.write(f"{name}: failed: {type(error).__name__}: {error}\n")
            failed.append(name)
            continue
        print(text, flush=True)
        if given.output:
            with given.output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return 1 if failed else 0


def measured(name: str, program: ModuleType, options: Options) -> str:
    sys.stderr.write(f"{name}: {options.repeat} ×\n")
    table = program.run(options)
    quick = " --quick" if options.quick else ""
    text = str(table.markdown(machine(), f"./dev bench {name} --repeat {options.repeat}{quick}"))
    return text + "\nThe promises are about more than --quick measures.\n" if options.quick else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
