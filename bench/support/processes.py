"""What processes used: the peak of their memory, and the bytes they read of some files. Linux only."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# Some python processes come and go within a second; the peak is what the kernel has noted, not what is seen here.
LOOK_SECONDS = 0.02
READING = "read,pread64,readv,preadv,preadv2,mmap,sendfile,copy_file_range,splice"


class PeakMemory:
    """The largest peak of any process whose command line has a word in it, while the block runs."""

    def __init__(self, words: Iterable[str], directory: Path) -> None:
        """Only processes that work in `directory` count: others on this machine may run the same program."""
        self.bytes = dict.fromkeys(words, 0)
        self._directory = directory.resolve()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            for process in Path("/proc").iterdir():
                if process.name.isdigit():
                    self._look_at(process)

    def _look_at(self, process: Path) -> None:
        try:
            command = (process / "cmdline").read_bytes().decode("utf-8", "replace")
            found = [word for word in self.bytes if word in command]
            if not found or (process / "cwd").readlink() != self._directory:
                return
            peak = high_water((process / "status").read_text())
        except OSError:
            return
        for word in found:
            self.bytes[word] = max(self.bytes[word], peak)


def high_water(status: str) -> int:
    """VmHWM of a /proc/PID/status, in bytes; 0 of a process that is ending."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def bytes_read(
    command: Sequence[str], files: Sequence[Path], directory: Path, environment: Mapping[str, str], log: Path
) -> dict[str, int]:
    """Run a command under strace; return what it and all that it starts read of each file, by the file's path."""
    paths = [word for file in files for word in ("-P", os.path.realpath(file))]
    words = ["strace", "-f", "-qq", "-y", "-s", "0", *paths, "-e", f"trace={READING}", "-o", str(log), *command]
    done = subprocess.run(words, cwd=directory, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return sum_of_reads(log.read_text(errors="replace"), [os.path.realpath(file) for file in files])


def sum_of_reads(trace: str, files: Sequence[str]) -> dict[str, int]:
    """The bytes that the calls of a trace (strace -y) returned, by the file they name. A mapping counts as a whole."""
    found = dict.fromkeys(files, 0)
    for line in trace.splitlines():
        for file in files:
            if f"<{file}>" not in line:
                continue
            call, _, answer = line.rpartition(" = ")
            number = answer.split()[0] if answer.split() else ""
            if "mmap(" in call:
                found[file] += int(call.split("mmap(", 1)[1].split(", ")[1])
            elif number.isdigit():
                found[file] += int(number)
    return found
