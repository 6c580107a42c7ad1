"""How fast adapters that nobody has seen before are hashed, from the disk, against SHA-256 alone on one core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.support.machine import drop_caches, version_of
from bench.support.options import Options
from bench.support.scratch import scratch
from bench.support.site import adapters_of
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import timed

IMAGES = ()
# Seconds without the interpreter's start: of the work that a preview does for a new adapter, memory of it included.
PROGRAM = """
import sys, time
from pathlib import Path
from components.core.digest_cache import DigestCache
cache = DigestCache(Path(sys.argv[1]))
cache.memory.remember("none", {"any": ("state", "answer")})  # a file that is there, as on every machine but a new one
begin = time.perf_counter()
facts = cache.describe_all([Path(word) for word in sys.argv[2:]])
print(time.perf_counter() - begin, sum(fact.size for fact in facts))
"""
READ = """
import sys, time
begin, buffer, size = time.perf_counter(), bytearray(2**20), 0
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
print(time.perf_counter() - begin, size)
"""


def run(options: Options) -> Table:
    cores = os.cpu_count() or 1
    alone, together, warm, openssl, disk, dgst = [], [], [], [], [], []
    with scratch() as work:
        adapters = list(adapters_of(work / "adapters", options.large_adapters).values())
        weights = adapters[0] / "adapter_model.safetensors"
        for number in range(options.repeat):
            openssl.append(openssl_speed(1 if options.quick else 3))
            empty_cache(adapters)
            disk.append(megabytes_a_second([READ, str(weights)]))
            empty_cache(adapters)
            openssl_digest(Path(os.devnull))  # so that openssl itself is in the cache again
            start = timed(partial(openssl_digest, Path(os.devnull)))
            dgst.append(weights.stat().st_size / (timed(partial(openssl_digest, weights)) - start) / 1e6)
            empty_cache(adapters)
            alone.append(megabytes_a_second([PROGRAM, str(work / f"alone-{number}"), str(adapters[0])]))
            warm.append(megabytes_a_second([PROGRAM, str(work / f"warm-{number}"), str(adapters[0])]))
            for adapter in adapters:
                megabytes_a_second([READ, *map(str, adapter.iterdir())])
            together.append(megabytes_a_second([PROGRAM, str(work / f"all-{number}"), *map(str, adapters)]))
    one, cached = Figure(alone, "MB/s"), Figure(warm, "MB/s")
    there = Figure(openssl, "MB/s")
    table = Table(
        "Digests",
        "The digests of adapters of 160 MB that this machine has not seen, read from a disk whose cache is empty: what "
        "the first preview of an adapter waits for. Against `openssl speed -evp sha256` in blocks of 1 MiB on one "
        "core, which reads nothing and hashes one block again and again, and against `openssl dgst -sha256` of the "
        "same file, which does what has to be done; its own start is taken off.",
        versions={"OpenSSL": version_of(["openssl", "version"])},
    )
    table.add(
        Row("one adapter, cold", one, "openssl speed", there, Goal(at_least=0.9)),
        Row("one adapter, cold", one, "openssl dgst, cold", Figure(dgst, "MB/s"), Goal(at_least=0.9)),
        Row("one adapter, cold", one, "reading it alone, cold", Figure(disk, "MB/s")),
        Row("one adapter, in the cache", cached, "openssl speed", there),
        Row(f"{len(adapters)} adapters, in the cache, {cores} cores", Figure(together, "MB/s"),
            "one adapter, in the cache", cached, Goal(at_least=1.5) if cores > 1 else None),
    )  # fmt: skip
    return table


def megabytes_a_second(words: Sequence[str]) -> float:
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, check=True)
    seconds, size = done.stdout.split()
    return int(size) / float(seconds) / 1e6


def openssl_speed(seconds: int) -> float:
    words = ["openssl", "speed", "-elapsed", "-evp", "sha256", "-bytes", "1048576", "-seconds", str(seconds)]
    return of_openssl(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def openssl_digest(file: Path) -> None:
    subprocess.run(["openssl", "dgst", "-sha256", str(file)], stdout=subprocess.DEVNULL, check=True)


def of_openssl(said: str) -> float:
    """MB/s from the last line that `openssl speed` prints: "sha256   1699081.48k", thousands of bytes a second."""
    last = said.strip().splitlines()[-1].split()[-1]
    return float(last.removesuffix("k")) / 1000


def empty_cache(adapters: Sequence[Path]) -> None:
    """Leave nothing of the adapters in the file system's cache."""
    if drop_caches() or not hasattr(os, "posix_fadvise"):
        return
    for file in (file for adapter in adapters for file in adapter.iterdir()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
