"""How long `lora check` takes for many large adapters, and what it reads: `.venv/bin/python -m bench.lora_check`.

Every run is a process of its own that remembers nothing; as root on Linux, the file system's cache is dropped first.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.large_adapters import large_adapters

ADAPTERS = 200
RUNS = 7
PROGRAM = """
import sys
from components.cli.main import main
code = main(sys.argv[1:])
with open("/proc/self/io") as io:
    sys.stderr.write(io.readline().split()[1])
sys.exit(code)
"""


def measured(adapters: list[Path]) -> tuple[float, int]:
    """One run: seconds from start to end of the process, and bytes it read, the interpreter's modules included."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, "check", *map(str, adapters)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, int(done.stderr)


def main() -> None:
    """Print the median."""
    with tempfile.TemporaryDirectory() as directory:
        adapters = large_adapters(Path(directory), ADAPTERS)
        size = (adapters[0] / "adapter_model.safetensors").stat().st_size
        runs = []
        for _ in range(RUNS):
            with contextlib.suppress(OSError):
                Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
            runs.append(measured(adapters))
    seconds = statistics.median(run[0] for run in runs)
    read = max(run[1] for run in runs)
    sys.stdout.write(
        f"{ADAPTERS} adapters of {size / 1e6:.0f} MB: median of {RUNS} runs {seconds:.2f} s "
        f"(slowest {max(run[0] for run in runs):.2f} s), {read / 1e6:.1f} MB read\n"
    )


if __name__ == "__main__":
    main()
