"""Drift: what of an engine is not as its last activation left it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from typing import Any, Dict, Iterator, Tuple

from . import blobs, files, programs, proof, proxy, secret_files, tars, units
from .documents import Document
from .names import engine_of, name_of, unit_name
from .said import Refusal, named
from .store import Store
from .units import Generation


def cut_short(blob: str) -> bool:
    """Whether a blob has lost an end, as far as the sizes in its own header tell without reading it all."""
    try:
        if not all(os.stat(os.path.join(blob, member)).st_size for member in tars.MEMBERS):
            return True
        with open(os.path.join(blob, tars.MEMBERS[1]), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 100 * files.PIECE)).decode("utf-8"))
            end = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
            return bool(os.fstat(file.fileno()).st_size != 8 + length + end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
        return False  # its digest tells


def blob_drift(store: Store, generation: Generation, hashed: bool) -> Iterator[Tuple[str, str]]:
    """What is wrong with the blobs of an engine; where each is `hashed`, one that was altered is marked for `missing`.

    Where it is not, the sizes alone are looked at.
    """
    from concurrent.futures import ThreadPoolExecutor

    needed = units.needed_blobs(store, generation)
    there = [name for name in needed if store.has_blob(name)]
    altered = {name for name in needed if store.is_altered(name)}
    if hashed:
        with ThreadPoolExecutor(4) as pool:  # hashlib works without Python's lock
            whole = {name: pool.submit(blobs.is_whole, store, name) for name in there}
        for name in there:
            if not whole[name].result():
                with contextlib.suppress(OSError):  # on a disk that takes no more, it is told all the same
                    files.write_file(store.staged(name, ".altered"), b"", 0o600)
                altered.add(name)
    else:
        altered.update(name for name in there if cut_short(store.blob(name)) or blobs.strays(store.blob(name)))
    for name, models in needed.items():
        if name in altered:
            more = blobs.strays(store.blob(name))
            beside = ": not of it is " + named(more) if more else ""
            yield "blob of " + models, "sha256:%s was altered%s" % (name, beside)
        elif name not in there:
            yield "blob of " + models, "sha256:%s is gone" % name


def drift(store: Store, engine: str, hashed: bool) -> Dict[str, str]:
    """What of an engine is not as its last activation left it: what -> how it is instead."""
    tried = units.generations(store, engine)
    if not tried:
        return {"activation": "nothing of this engine is on the pod"}
    if not tried[-1].proven:
        holder = files.holder_of(store.engine_lock(engine))
        return {"activation": "one is under way (%s)" % holder if holder else "the last one did not end well"}
    last, unit = tried[-1], unit_name(engine)
    found = dict(blob_drift(store, last, hashed))
    installed = files.read_file(store.unit_file(engine))
    if installed != last.text.encode("utf-8"):
        found["unit"] = "is gone" if installed is None else "was edited by hand"
    revision = last.document["secretsRevision"]
    kept = (
        files.read_file(secret_files.secrets_file(store, engine, revision))
        if revision
        else secret_files.secrets_bytes(store, engine, 0)
    )
    if kept is None or files.read_file(secret_files.secrets_file(store, engine)) != kept:
        found["secrets"] = "are gone or were edited by hand"
    state = programs.unit_state(unit)
    if state.active != "active":
        found["engine"] = "does not run: %s" % (state,)
    else:
        fault = proof.unready(last.document, secret_files.read_secrets(store, engine).get("VLLM_API_KEY"))
        if fault:
            found["serves"] = secret_files.redactor(store, engine)(fault)[:300]
    if not proxy.proxy_stands(store, engine, last.document):
        found["proxy"] = "is gone, was edited by hand or does not run"
    if not programs.is_enabled(unit):
        found["at boot"] = "it would not start: its unit is not enabled"
    version = units.other_version(engine, last)
    if version:
        found["vLLM"] = version
    found.update(dict(units.rolled_back(last)) or reference_drift(store, engine, last))
    return found


def reference_drift(store: Store, engine: str, generation: Generation) -> Dict[str, str]:
    """Where the references of an engine's models are not to what it serves.

    An `up` that is killed before Pulumi noted a `place` that was done, and is given up, leaves them so: going back
    is no difference for Pulumi.
    """
    stack = generation.document["stack"]
    bases = [name for name in generation.document["ready"]["models"] if engine_of(stack, name) == engine]
    served = {model: digest for model, digest in units.digests_of(generation.document).items() if digest}
    try:
        held = {ref.model: ref.digest for ref in store.refs() if ref.stack == stack and ref.base in bases}
    except Refusal as refusal:
        return {"references": str(refusal)}
    if not bases:
        return {}
    found = {}
    for model in sorted(set(served) | set(held)):
        if model not in held:
            found["reference of " + model] = "is gone"
        elif model not in served:
            found["reference of " + model] = "is to %s, which is not served" % held[model]
        elif held[model] != served[model]:
            found["reference of " + model] = "is to %s, and %s is served" % (held[model], served[model])
    return found


def verb_intact(store: Store, options: Any) -> Document:
    """Whether an engine is as its last activation left it, its blobs to the last byte. -> {"drift": {what: how}}."""
    return {"drift": drift(store, name_of(options.engine, "engine"), hashed=True)}
