"""Generations: each unit that was tried, the document it came in and what it was proven with."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from . import files, programs
from .documents import Document, field
from .names import BLOB_PATH, hex_of, unit_name
from .said import Refusal, clean
from .store import Store


class Generation(NamedTuple):
    """One unit that was tried, with the document it came in."""

    n: int
    path: str
    text: str
    document: Document
    proven: bool


def generations(store: Store, engine: str) -> List[Generation]:
    """Oldest first; what a killed run left half written is passed over."""
    found = []
    for n in files.listed(store.path("units", engine)):
        path = store.path("units", engine, n)
        text, document = files.read_file(os.path.join(path, "unit")), files.read_file(os.path.join(path, "doc.json"))
        if n.isdigit() and text is not None and document is not None:
            proven = os.path.exists(os.path.join(path, "proven"))
            found.append(Generation(int(n), path, text.decode("utf-8"), json.loads(document.decode("utf-8")), proven))
    return sorted(found)


def write_generation(store: Store, engine: str, n: int, document: Document) -> Generation:
    path = store.path("units", engine, str(n))
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.path("units", engine)):
            if re.fullmatch(r"\.[0-9]+\.gone", name):
                files.remove_tree(store.path("units", engine, name))  # of a run that was killed
    text = field(document, "unit.text", str)
    kept = {**document, "unit": {"name": unit_name(engine)}}
    files.write_file(os.path.join(path, "unit"), text.encode("utf-8"))
    files.write_file(os.path.join(path, "doc.json"), json.dumps(kept, sort_keys=True, indent=1).encode("utf-8"))
    files.fsync_dir(store.path("units", engine))
    return Generation(n, path, text, kept, False)


def mark_stale(store: Store, loaded: str) -> None:
    """Has the engines whose units name `loaded` started again by their next activation: they hold what was there."""
    for engine in files.listed(store.path("units")):
        for generation in generations(store, engine)[-1:]:
            if loaded in generation.text:
                files.write_file(os.path.join(generation.path, "stale"), b"")


def drop_generation(store: Store, engine: str, generation: Generation) -> None:
    files.discard(generation.path, store.path("units", engine, ".%d.gone" % generation.n))


def keep_version(engine: str, generation: Generation) -> None:
    """Remembers which vLLM a generation is tried with; a later one would be another engine under the same unit."""
    version = programs.installed_vllm(engine)
    if version and started_version(generation) != version:
        with contextlib.suppress(OSError):  # where the disk takes no more, the next activation asks again
            files.write_file(os.path.join(generation.path, "vllm"), version.encode("utf-8"))


def started_version(generation: Generation) -> str:
    return (files.read_file(os.path.join(generation.path, "vllm")) or b"").decode("utf-8", "replace")


def other_version(engine: str, generation: Generation) -> str:
    """How the vLLM that is installed differs from the one that was proven, "" if it does not."""
    proven = started_version(generation)
    installed = programs.installed_vllm(engine) if proven else ""
    if not installed or installed == proven:
        return ""
    return "%s is installed, and %s was proven" % (clean(installed)[:60], clean(proven)[:60])


def needed_blobs(store: Store, generation: Generation) -> Dict[str, str]:
    """Digest -> the models that have it (or what else names it), of what the unit or the references name."""
    models: Dict[str, Set[str]] = {hexdigest: set() for hexdigest in BLOB_PATH.findall(generation.text)}
    for model, root in generation.document["ready"]["models"].items():
        for hexdigest in BLOB_PATH.findall(str(root)):
            models.setdefault(hexdigest, set()).add(model)
    with contextlib.suppress(Refusal):  # a damaged reference is told by what needs it
        for ref in store.refs():
            if ref.stack == generation.document["stack"] and ref.model in generation.document["ready"]["models"]:
                models.setdefault(hex_of(ref.digest), set()).add(ref.model)
    return {hexdigest: ", ".join(sorted(names)) or "the unit" for hexdigest, names in sorted(models.items())}


def digests_of(document: Document) -> Dict[str, Optional[str]]:
    """Model -> the digest it is served from; None for what is no bundle's."""
    found: Dict[str, Optional[str]] = {}
    for model, root in sorted(document["ready"]["models"].items()):
        match = BLOB_PATH.search(str(root))
        found[model] = "sha256:" + match.group(1) if match else None
    return found


def rolled_back(generation: Generation) -> Iterator[Tuple[str, str]]:
    """How what a `rollback` put back differs from what was activated last; nothing if there was none since."""
    raw = files.read_file(os.path.join(generation.path, "rolled-back"))
    if raw is None:
        return
    wanted, now = json.loads(raw.decode("utf-8")), digests_of(generation.document)
    yield "rollback", "what was activated before the last activation serves again"
    for model in sorted(set(wanted) | set(now)):
        if model not in now:
            yield "model " + model, "is not served since the rollback"
        elif model not in wanted:
            yield "model " + model, "is served since the rollback"
        elif wanted[model] != now[model]:
            short = [(digest or "the base")[-64:][:12] for digest in (now[model], wanted[model])]
            yield "model " + model, "serves %s instead of %s since the rollback" % tuple(short)
