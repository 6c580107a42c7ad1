"""Going back by hand: what an engine served before its last activation serves again."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, NamedTuple, Optional, Sequence

from . import activation, files, probe, proof, proxy, secret_files, units, waiting
from .documents import Document, number
from .names import BLOB_PATH, name_of, unit_name
from .said import Refusal
from .store import Store
from .units import Generation


class Step(NamedTuple):
    """From what serves (`last`) to what served before it (`previous`)."""

    previous: Generation
    last: Optional[Generation]
    """None where a rollback that was killed has removed it already."""
    begun: Optional[Generation]
    """What that rollback had proven, and not yet made count."""


def step_of(tried: Sequence[Generation]) -> Optional[Step]:
    """The way back; None where nothing else is kept. What was activated twice in a row is one."""
    good = [generation for generation in tried if generation.proven]
    begun = tried[-1] if tried and not tried[-1].proven and was_rolled_back(tried[-1]) else None
    wanted = [generation for generation in good if begun and same(generation, begun)]
    if wanted:
        return Step(wanted[-1], next((g for g in reversed(good) if g.n > wanted[-1].n), None), begun)
    others = [g for g in good if not same(g, good[-1])]
    return Step(others[-1], good[-1], None) if others else None


def was_rolled_back(generation: Generation) -> Optional[bytes]:
    return files.read_file(os.path.join(generation.path, "rolled-back"))


def verb_rollback(store: Store, options: Any) -> Document:
    """Puts back what an engine served before its last activation, and proves it as an activation does."""
    engine = name_of(options.engine, "engine")
    known = [number(g.document, "ready.timeoutSeconds") for g in units.generations(store, engine)]
    with store.lock_engine(engine, "rollback", activation.LOADING_SPARE_SECONDS + 3 * max(known, default=0)):
        tried = units.generations(store, engine)
        if unfinished(tried):
            finish(store, engine, tried[-1])
            return answer(engine, tried[-1], wanted_before(tried[-1]))
        step = step_of(tried)
        if step is None:
            raise Refusal("nothing is kept on this pod that engine %s served before" % engine)
        standing = step.last or step.previous
        document = {**step.previous.document, "unit": {"name": unit_name(engine), "text": step.previous.text}}
        with store.lock("rollback"):
            refuse_what_cannot_come_back(store, engine, step.previous)
            activation.end_unproven(store, engine)
            for killed in [g for g in tried if not g.proven and g != step.begun]:
                units.drop_generation(store, engine, killed)
            n = step.begun.n if step.begun else standing.n + 1
            try:
                trial_of = units.write_generation(store, engine, n, document)
                trial = activation.install(store, engine, trial_of)
            except OSError:
                activation.leave_standing(store, engine, n, [standing], [])
                raise
        units.keep_version(engine, trial_of)
        what, journalled = "did not become ready", True
        fault = proof.await_ready(store, engine, document, trial, attended=True)
        if not fault:
            what = "is not kept"
            fault, journalled = proxy.proxy_fault(store, engine, document), False
        if not fault:
            fault, journalled, _ = probe.prove(store, engine, document, trial)
        if not fault:
            fault, journalled = (proof.INTERRUPTED, False) if waiting.deserted() else ("", False)
        if fault:
            told = proof.explain(store, engine, trial) if journalled else ("", [])
            if trial.state.invocation:
                activation.end_loading(engine, [document])
            raise activation.go_back(store, engine, [standing], trial_of, what, fault, told, [])
        if step.last is not None:
            served = json.dumps(units.digests_of(step.last.document), sort_keys=True)
            # What a rollback before this one put back is not what Pulumi knows.
            instead = was_rolled_back(step.last) or served.encode("utf-8")
            files.write_file(os.path.join(trial_of.path, "rolled-back"), instead)
            units.drop_generation(store, engine, step.last)
        files.write_file(os.path.join(trial_of.path, "proven"), b"")
        finish(store, engine, trial_of)
        before = units.digests_of(step.last.document) if step.last else wanted_before(trial_of)
        return answer(engine, trial_of, before)


def unfinished(tried: Sequence[Generation]) -> bool:
    """Whether a rollback was killed after it counted: run again, it must not go one further."""
    last = tried[-1] if tried else None
    return bool(last and last.proven and was_rolled_back(last) and any(same(g, last) for g in tried[:-1]))


def finish(store: Store, engine: str, last: Generation) -> None:
    for old in units.generations(store, engine):
        if old.n < last.n and same(old, last):
            units.drop_generation(store, engine, old)


def same(one: Generation, other: Generation) -> bool:
    return activation.asked_for(one) == activation.asked_for(other)


def wanted_before(generation: Generation) -> Dict[str, Optional[str]]:
    found: Dict[str, Optional[str]] = json.loads((was_rolled_back(generation) or b"{}").decode("utf-8"))
    return found


def answer(engine: str, generation: Generation, before: Dict[str, Optional[str]]) -> Document:
    activation.report(engine, generation, restarted=True, found={})
    models = units.digests_of(generation.document)
    return {"engine": engine, "unit": unit_name(engine), "models": models, "before": before}


def refuse_what_cannot_come_back(store: Store, engine: str, previous: Generation) -> None:
    for hexdigest, models in units.needed_blobs(store, previous).items():
        if hexdigest in BLOB_PATH.findall(previous.text) and not store.has_blob(hexdigest):
            raise Refusal("sha256:%s (%s), which was served before, is not on this pod any more" % (hexdigest, models))
    rivals = activation.rivals_on(store, engine, previous.document)
    if rivals:
        raise Refusal("port %d, which it had before, is %s's now" % (previous.document["port"], unit_name(rivals[0])))
    secret_files.secrets_bytes(store, engine, previous.document["secretsRevision"])
