"""What it was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        time.strftime("%Y-%m-%d", time.gmtime()),
        f"{os.cpu_count()} cores ({cpu_model()})",
        f"{memory:.0f} GiB",
        f"{platform.system()} {platform.release().split('-')[0]}",
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.1f} at the end",
    ]
    return ", ".join(parts)


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version_of(words: Sequence[str]) -> str:
    """The first dotted number in what a program says of itself, on either stream."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return "missing"
    for word in (done.stdout + done.stderr).replace(",", " ").split():
        number = word.removeprefix("v").split("_")[-1]
        if number[:1].isdigit() and "." in number:
            return number.rstrip("]).:")
    return "unknown"


def drop_caches() -> bool:
    """Whether the file system's cache could be emptied (root on Linux)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        return False
    return True
