"""How the pod and its engines stand, for people."""

from __future__ import annotations

import os
import re
import time
from typing import Any, List, NamedTuple, Optional

from . import drift, files, programs, proof, secret_files, units
from .documents import Document
from .names import unit_name
from .said import clean
from .store import Store

GPU_SECONDS = 8.0  # for nvidia-smi, where all of a pod's status is given some twenty


class Standing(NamedTuple):
    """How a unit stands, for people: its state, and since when (seconds since 1970; None where it never changed)."""

    state: str
    since: Optional[float]


def standing(unit: str) -> Standing:
    changed = re.search(
        r"^StateChangeTimestampMonotonic=([1-9]\d*)$",
        programs.systemctl("show", "-p", "StateChangeTimestampMonotonic", unit).out,
        re.M,
    )
    ago = time.monotonic() - int(changed.group(1)) / 1e6 if changed else None
    return Standing(str(programs.unit_state(unit)), None if ago is None else time.time() - ago)


def engine_status(store: Store, engine: str) -> Document:
    tried = units.generations(store, engine)
    now = standing(unit_name(engine))
    found: Document = {
        "engine": engine,
        "unit": unit_name(engine),
        "state": now.state,
        "since": None if now.since is None else round(now.since),
        "enabled": programs.is_enabled(unit_name(engine)),
        "models": None,
        "vllm": programs.installed_vllm(engine) or None,
        "drift": drift.drift(store, engine, hashed=False),
    }
    if tried:
        document = tried[-1].document
        served, fault = proof.served_models(
            document["ready"]["url"], secret_files.read_secrets(store, engine).get("VLLM_API_KEY")
        )
        found.update(stack=document["stack"], generation=tried[-1].n, models=None if fault else sorted(served))
    return found


def gpus_in_use() -> List[Document]:
    """Each GPU's name and memory; MiB, None where its driver does not say."""
    query = "--query-gpu=name,memory.used,memory.total"
    ran = programs.run("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=GPU_SECONDS)
    if ran.status == 124:
        return [{"name": "nvidia-smi does not answer", "usedMiB": None, "totalMiB": None}]
    found: List[Document] = []
    for line in ran.out.splitlines() if ran.status == 0 else []:
        name, *memory = line.rsplit(",", 2)
        used, total = [int(value) if value.strip().isdigit() else None for value in (*memory, "", "")[:2]]
        found.append({"name": clean(name.strip())[:80], "usedMiB": used, "totalMiB": total})
    return found


def verb_status(store: Store, options: Any) -> Document:
    """How this pod and its engines stand. Changes nothing, waits for nobody, and hashes nothing."""
    disk = os.statvfs(files.existing_parent(store.root))
    return {
        "machineId": (files.read_file("/etc/machine-id") or b"").decode("ascii", "replace").strip(),
        "disk": {"freeBytes": disk.f_bavail * disk.f_frsize, "totalBytes": disk.f_blocks * disk.f_frsize},
        "gpus": gpus_in_use(),
        "engines": [engine_status(store, engine) for engine in files.listed(store.path("units"))],
    }
