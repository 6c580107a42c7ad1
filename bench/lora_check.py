"""How long `lora check` takes for many large adapters, and what it reads of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.support.machine import drop_caches
from bench.support.options import Options
from bench.support.scratch import scratch
from bench.support.table import Figure, Row, Table
from tests.support.large_adapters import large_adapters

IMAGES = ()
ADAPTERS = 200
PROGRAM = """
import sys
from components.cli.main import main
code = main(sys.argv[1:])
with open("/proc/self/io") as io:
    sys.stderr.write(io.readline().split()[1])
sys.exit(code)
"""


def run(options: Options) -> Table:
    with scratch() as directory:
        adapters = large_adapters(directory, ADAPTERS)
        runs = []
        dropped = False
        for _ in range(options.repeat):
            dropped = drop_caches()
            runs.append(measured(adapters))
    cache = "its cache empty" if dropped else "its cache as it was"
    table = Table(
        "lora check",
        f"`lora check` of {ADAPTERS} adapters of 160 MiB, each run a process of its own that remembers nothing, the "
        f"file system with {cache}. Bytes read are the process's, the interpreter's modules included.",
    )
    table.add(
        Row(f"lora check, {ADAPTERS} adapters", Figure([seconds for seconds, _ in runs], "s")),
        Row("read meanwhile", Figure([read / 1e6 for _, read in runs], "MB")),
    )
    return table


def measured(adapters: list[Path]) -> tuple[float, int]:
    """One run: seconds from start to end of the process, and bytes it read."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, "check", *map(str, adapters)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, int(done.stderr)
