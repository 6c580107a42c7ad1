"""Activation: an engine is started and proven; if it does not serve, what did before comes back. Going back by hand."""

from __future__ import annotations

import contextlib
import os
import time
from typing import List, Optional, Sequence, Tuple

from . import blobs, files, probe, programs, proof, proxy, secret_files, units, waiting
from .documents import Document, field, number, optional
from .names import BLOB_PATH, name_of, proxy_name, unit_name
from .programs import State, Trial
from .said import Refusal, say
from .store import Store
from .units import Generation

LOADING_SPARE_SECONDS = 300.0  # for what an activation does besides waiting for its engine
KEPT_GENERATIONS = 3


def install(store: Store, engine: str, generation: Generation) -> Trial:
    """Puts a generation's secrets and unit in place and starts it anew."""
    unit = unit_name(engine)
    secret_files.write_secrets(
        store, engine, secret_files.secrets_bytes(store, engine, generation.document["secretsRevision"])
    )
    before = programs.unit_state(unit)
    since = time.time()
    if not proxy.proxy_stands(store, engine, generation.document):
        proxy.remove_proxy(store, engine)  # it may have the port that the engine is to have
    files.write_file(store.unit_file(engine), generation.text.encode("utf-8"))
    programs.enable(unit)
    programs.systemctl("reset-failed", unit)  # fails where the unit was never loaded
    files.unlink(os.path.join(generation.path, "stale"))
    ran = programs.systemctl_job("restart", unit)
    state = programs.unit_state(unit)
    if state.invocation == before.invocation:
        state = state._replace(invocation="")  # systemd refused to start it: the run before says nothing of this one
    proxy.start_proxy(store, engine, generation.document)
    return Trial(state, since, (ran.err.strip() or "systemctl restart failed") if ran.status else "")


def end_loading(engine: str, tried: Sequence[Document]) -> None:
    """Kills an engine that serves nobody: while vLLM loads, it does not hear the order to stop, and whatever is to come
    in its place would wait for all of TimeoutStopSec=. `tried` has where it may answer."""
    unit = unit_name(engine)
    if programs.unit_state(unit).active != "active":
        return
    # vLLM takes connections once it has loaded. A busy one may be slow to answer, and is let finish.
    if not any(proof.listens(document["ready"]["url"]) for document in tried):
        programs.systemctl("--no-block", "stop", unit)  # else it would be started again
        programs.systemctl("kill", "--signal=KILL", unit)


def end_unproven(store: Store, engine: str) -> None:
    """The same with what a run that was killed left loading."""
    tried = units.generations(store, engine)
    if tried and not tried[-1].proven:
        end_loading(engine, [generation.document for generation in tried])


def uninstall(store: Store, engine: str) -> bool:
    """Stops the engine and removes its unit. -> whether there was one."""
    unit = unit_name(engine)
    end_unproven(store, engine)
    proxy.remove_proxy(store, engine)
    programs.systemctl_job("disable", "--now", unit)
    programs.systemctl("reset-failed", unit)
    state = programs.unit_state(unit)
    if state.active not in ("inactive", "failed", "unknown"):
        raise Refusal("%s does not stop: it is %s" % (unit, state))
    removed = files.unlink(store.unit_file(engine))
    if removed:
        files.fsync_dir(store.units_dir)  # before the blobs that it names go
    programs.systemctl("daemon-reload")
    return removed


def check_engine(store: Store, document: Document) -> str:
    """The engine's name, once the document is sound and every blob it names is here."""
    engine = name_of(field(document, "engine", str), "engine")
    name_of(field(document, "stack", str), "stack")
    if field(document, "unit.name", str) != unit_name(engine):
        raise Refusal("the unit of engine %s must be named %s" % (engine, unit_name(engine)))
    if not field(document, "ready.url", str).startswith("http://"):
        raise Refusal("the document's ready.url must begin with http://")
    number(document, "ready.timeoutSeconds")
    if optional(document, "ready.probe", dict) is not None:
        if field(document, "ready.probe.base", str) not in field(document, "ready.models", dict):
            raise Refusal("the document's ready.probe.base must be one of its ready.models")
        field(document, "ready.probe.mayEqualBase", list)
    field(document, "port", int)
    proxy.check_proxy(engine, document)
    optional(document, "secretsRevision", int)
    roots = " ".join(root for root in field(document, "ready.models", dict).values() if isinstance(root, str))
    for hexdigest in sorted(set(BLOB_PATH.findall(field(document, "unit.text", str) + " " + roots))):
        if not store.has_blob(hexdigest):
            raise Refusal("sha256:%s, which the unit names, is not on this pod: it must be placed first" % hexdigest)
    return engine


def rivals_on(store: Store, engine: str, document: Document) -> List[str]:
    """Engines of this stack that run on this port: their base was renamed, say. Another stack's is refused."""
    found = []
    for other in files.listed(store.path("units")):
        tried = units.generations(store, other)
        if other == engine or not tried or not os.path.exists(store.unit_file(other)):
            continue
        theirs = tried[-1].document
        for port in sorted(proxy.ports_of(theirs) & proxy.ports_of(document)):
            if theirs["stack"] != document["stack"]:
                raise Refusal(
                    "port %d belongs to the engine %s of stack %s: choose another engine.port"
                    % (port, other, theirs["stack"])
                )
            if programs.unit_state(unit_name(other)).active not in ("inactive", "failed"):
                found.append(other)
            break
    return found


def switch(store: Store, engine: str, verb: str) -> None:
    """`enable` or `disable` an engine, and what stands before it, now and for the next boot."""
    programs.systemctl_job(verb, "--now", unit_name(engine))
    if os.path.exists(proxy.proxy_unit_file(store, engine)):
        programs.systemctl_job(verb, "--now", proxy_name(engine))


def refuse_taken_port(store: Store, engine: str, document: Document, active: bool) -> None:
    """A program that is not ours on the port would answer in the engine's place, or keep it from starting."""
    from urllib.parse import urlsplit

    known = [generation.document for generation in units.generations(store, engine)]
    ours = {its["port"] for its in known} if active else set()
    if os.path.exists(proxy.proxy_unit_file(store, engine)):
        ours.update(*(proxy.ports_of(its) - {its["port"]} for its in known))
    urls = [document["ready"]["url"], *([document["proxy"]["url"]] if document.get("proxy") else [])]
    for url in urls:
        if urlsplit(url).port not in ours and proof.listens(url):
            raise Refusal("another program already answers at %s: stop it, or choose another engine.port" % url)


def verb_activate(store: Store, document: Document) -> Document:
    """Makes this unit the engine's, and proves that it serves; if it does not, the last one that did comes back."""
    engine = check_engine(store, document)
    store.make_staging()
    # Who holds it may wait for an engine to become ready, then for each adapter's answer, and for the engine before.
    patience = 3 * number(document, "ready.timeoutSeconds") + LOADING_SPARE_SECONDS
    with store.lock_engine(engine, "activate", patience):
        revision = document.get("secretsRevision") or (secret_files.revisions(store, engine) or [0])[-1]
        secret_files.secrets_bytes(store, engine, revision)  # refuses before anything is stopped
        document = {**document, "secretsRevision": revision}
        state = programs.unit_state(unit_name(engine))
        current = settled(store, engine, document, state)
        if current is not None:
            running = Trial(state, time.time(), "")
            fault = proof.await_ready(store, engine, document, running, loaded=True)
            if not fault:
                if not programs.is_enabled(unit_name(engine)):
                    programs.enable(unit_name(engine))
                found: Document = {}
                proxy.renew_proxy(store, engine, current.document, document)
                if not probed_for(current.document, document):
                    fault, _, found = probe.prove(store, engine, document, running)
                    if fault:
                        raise Refusal("%s runs on as it is, but %s" % (unit_name(engine), fault))
                with store.lock("activate"):
                    current = units.write_generation(store, engine, current.n, document)
                    if not units.started_version(current):  # it was started by an earlier release
                        units.keep_version(engine, current)
                    files.unlink(os.path.join(current.path, "rolled-back"))
                tidy(store, engine)
                return report(engine, current, restarted=False, found=found)
            say(
                "the engine runs but is not ready, so it is started again: %s"
                % secret_files.redactor(store, engine)(fault)
            )
        with store.lock("activate"):
            rivals = rivals_on(store, engine, document)
            if not rivals:
                refuse_taken_port(store, engine, document, state.active == "active")
            tried = units.generations(store, engine)
            good = [g for g in tried if g.proven]
            end_unproven(store, engine)
            for killed in [g for g in tried if not g.proven]:
                units.drop_generation(store, engine, killed)
            n = tried[-1].n + 1 if tried else 1
            try:
                trial_of = units.write_generation(store, engine, n, document)
                for other in rivals:
                    say("stopping %s, which has this port in this stack" % unit_name(other))
                    switch(store, other, "disable")
                trial = install(store, engine, trial_of)
            except OSError:
                leave_standing(store, engine, n, good, rivals)
                raise
        units.keep_version(engine, trial_of)  # asking takes a while, and the engine loads meanwhile
        fault = proof.await_ready(store, engine, document, trial, attended=True)
        if fault:
            told = proof.explain(store, engine, trial)
            if trial.state.invocation:
                end_loading(engine, [document])
            raise go_back(store, engine, good, trial_of, "did not become ready", fault, told, rivals)
        fault = proxy.proxy_fault(store, engine, document)
        if fault:
            raise go_back(store, engine, good, trial_of, "is not kept", fault, ("", []), rivals)
        fault, journalled, found = probe.prove(store, engine, document, trial)
        if fault:
            told = proof.explain(store, engine, trial) if journalled else ("", [])
            raise go_back(store, engine, good, trial_of, "is not kept", fault, told, rivals)
        if waiting.deserted():  # the last moment at which that can be undone
            raise go_back(store, engine, good, trial_of, "is not kept", proof.INTERRUPTED, ("", []), rivals)
        files.write_file(os.path.join(trial_of.path, "proven"), b"")
        tidy(store, engine)
    return report(engine, trial_of, restarted=True, found=found)


def tidy(store: Store, engine: str) -> None:
    """Removes what no generation that is kept needs."""
    good = [generation for generation in units.generations(store, engine) if generation.proven]
    # What was activated again, to mend it or after another, is one of them: going back goes to what was served before.
    others = [generation for generation in good if asked_for(generation) != asked_for(good[-1])]
    kept = [*others, *good[-1:]][-KEPT_GENERATIONS:]
    for old in good:
        if old not in kept:
            units.drop_generation(store, engine, old)
    try:
        with store.lock("activate"):
            secret_files.drop_old_secrets(store, engine)
            blobs.collect(store)
    except Refusal as refusal:
        say(str(refusal))  # the engine serves all the same


def asked_for(generation: Generation) -> Tuple[str, int]:
    """What an activation that asks for the same finds done: the unit's text, and the revision of its secrets."""
    return generation.text, generation.document["secretsRevision"]


def probed_for(before: Document, wanted: Document) -> bool:
    """Whether an activation like `before` proved what `wanted` demands of the same unit's adapters."""
    demanded, proved = wanted["ready"].get("probe"), before["ready"].get("probe")
    if demanded is None:
        return True
    return proved is not None and set(proved["mayEqualBase"]) <= set(demanded["mayEqualBase"])


def settled(store: Store, engine: str, document: Document, state: State) -> Optional[Generation]:
    """The generation that runs, if it is what the document asks for and was proven with these secrets."""
    tried = units.generations(store, engine)
    if not tried or not tried[-1].proven or state.active != "active":
        return None
    text, revision = document["unit"]["text"], document["secretsRevision"]
    if asked_for(tried[-1]) != (text, revision):
        return None
    if os.path.exists(os.path.join(tried[-1].path, "stale")):
        say("an adapter or the vLLM that the engine loaded was put there anew, so it is started again")
        return None
    version = units.other_version(engine, tried[-1])
    if version:
        say("vLLM %s, so the engine is started again" % version)
        return None
    in_force = (files.read_file(store.unit_file(engine)), files.read_file(secret_files.secrets_file(store, engine)))
    wanted = (text.encode("utf-8"), secret_files.secrets_bytes(store, engine, revision))
    return tried[-1] if in_force == wanted else None


def report(engine: str, generation: Generation, restarted: bool, found: Document) -> Document:
    count = len(generation.document["ready"]["models"])
    say("%s serves %d model%s" % (unit_name(engine), count, "" if count == 1 else "s"))
    return {"engine": engine, "unit": unit_name(engine), "generation": generation.n, "restarted": restarted, **found}


def leave_standing(store: Store, engine: str, n: int, good: Sequence[Generation], rivals: Sequence[str]) -> None:
    """Where the disk took no more before generation `n` was installed whole: what served goes on serving."""
    with contextlib.suppress(OSError):
        for other in rivals:
            switch(store, other, "enable")
        files.remove_tree(store.path("units", engine, str(n)))
        if not good:
            return
        before = good[-1]
        if files.read_file(store.unit_file(engine)) != before.text.encode("utf-8"):
            install(store, engine, before)
            return
        in_force = secret_files.secrets_bytes(store, engine, before.document["secretsRevision"])
        secret_files.write_secrets(store, engine, in_force)
        if before.document.get("proxy"):
            proxy.start_proxy(store, engine, before.document)  # it made room for the coming one


def go_back(
    store: Store,
    engine: str,
    good: Sequence[Generation],
    failed: Generation,
    what: str,
    fault: str,
    told: Tuple[str, Sequence[str]],
    rivals: Sequence[str],
) -> Refusal:
    """Puts back what served before `failed`. -> the failure to report: `what` it did and why, and what serves now.

    `told` is what `explain` made of its journal.
    """
    unit, redact = unit_name(engine), secret_files.redactor(store, engine)
    cause, details = told
    sentence = "%s %s: %s" % (unit, what, redact(fault))
    if cause and cause not in sentence:
        sentence += ": " + cause
    units.drop_generation(store, engine, failed)
    serving = []
    if good:
        say("%s %s, so generation %d comes back" % (unit, what, good[-1].n))
        models = sorted(good[-1].document["ready"]["models"])
        try:
            fault = proof.await_ready(store, engine, good[-1].document, install(store, engine, good[-1]))
            fault = fault or proxy.proxy_fault(store, engine, good[-1].document)
        except Refusal as refusal:
            fault = str(refusal)
        if fault:
            serving.append("the unit from before did not come back either: %s" % redact(fault))
        else:
            more = ", ..." if len(models) > 5 else ""
            serving.append("the unit from before serves again (%s%s)" % (", ".join(models[:5]), more))
    else:
        uninstall(store, engine)
        files.remove_if_empty(store.path("units", engine))
    for other in rivals:
        switch(store, other, "enable")
        serving.append("%s was started again" % unit_name(other))
    now = " and ".join(serving) or "nothing served before it, so the unit is removed"
    return Refusal("%s; %s" % (sentence, now), details)
