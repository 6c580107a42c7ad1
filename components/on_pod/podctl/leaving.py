"""What goes: an engine's secrets, an engine, everything of ours."""

from __future__ import annotations

import os
import re
from typing import Any, Iterator

from . import activation, blobs, files, secret_files
from .documents import Document
from .names import engine_of, name_of
from .said import few, say
from .store import Store


def verb_unsecret(store: Store, options: Any) -> Document:
    """Removes an engine's secrets, and the engine: without its API key it must not serve."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"removed": False}
    with store.lock_engine(engine, "unsecret"), store.lock("unsecret"):
        # `deactivate` ran before this, unless Pulumi was interrupted while the engine loaded and knows nothing of it.
        forget_engine(store, engine)
        kept = secret_files.revisions(store, engine)
        secret_files.drop_secrets(
            store,
            [
                *(secret_files.secrets_file(store, engine, revision) for revision in kept),
                *(secret_files.tls_key_file(store, engine, name) for name in secret_files.tls_keys(store, engine)),
            ],
        )
        blobs.collect(store)
    return {"removed": bool(kept)}


def remove_state(store: Store, engine: str) -> None:
    """Removes an engine's StateDirectory: its home, with what it downloaded. systemd keeps it past the unit."""
    link = "%s-%s" % (store.root, engine)
    private = os.path.join(os.path.dirname(link), "private", os.path.basename(link))
    # systemd makes this pair for DynamicUser=; a directory of the same name that somebody else made is not touched.
    if os.path.islink(link) and os.path.realpath(link) == os.path.realpath(private):
        files.unlink(link)
        files.remove_tree(private)


def forget_engine(store: Store, engine: str) -> bool:
    removed = activation.uninstall(store, engine)
    secret_files.drop_secrets(store, [secret_files.secrets_file(store, engine)])
    remove_state(store, engine)
    files.discard(store.path("units", engine), store.path("units", ".%s.gone" % engine))
    return removed


def verb_deactivate(store: Store, options: Any) -> Document:
    """Takes an engine away: its process, its unit, what it downloaded."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"engine": engine, "removed": False, "collected": []}
    with store.lock_engine(engine, "deactivate"), store.lock("deactivate"):
        removed = forget_engine(store, engine)
        return {"engine": engine, "removed": removed, "collected": few(blobs.collect(store))}


def uploads(store: Store) -> Iterator[str]:
    """The bundles that are arriving now. Whose they are cannot be told, so what only lies in staging is nobody's."""
    for name in files.listed(store.path("staging")):
        if name.endswith(".lock"):
            fd, _ = files.try_lock(store.path("staging", name))
            if fd is None:
                yield name[: -len(".lock")]
            else:
                os.close(fd)


def verb_remove(store: Store, options: Any) -> Document:
    """Takes everything of ours off the pod, unless a stack or an engine still uses it."""
    if not os.path.isdir(store.root):
        return {"removed": True, "left": []}
    with store.lock("remove"):
        left = ["model %s of stack %s" % (ref.model, ref.stack) for ref in store.refs()]
        left += ["upload of sha256:%s" % hexdigest for hexdigest in uploads(store)]
        secrets = {
            re.sub(r"(\.[0-9]+)?\.env$|\.tls-[0-9a-f]{16}\.key$", "", name)
            for name in files.listed(store.path("secrets"))
        }
        left += ["engine %s" % name for name in sorted(secrets.union(files.listed(store.path("units"))))]
        if left:
            say("others still use this pod, so nothing is removed: %s" % ", ".join(left))
            return {"removed": False, "left": left}
        # An engine that never served has no unit any more, but may have downloaded its model.
        prefix = os.path.basename(store.root) + "-"
        for name in files.listed(os.path.dirname(store.root)):
            if name.startswith(prefix) and not os.path.exists(store.unit_file(name[len(prefix) :])):
                remove_state(store, name[len(prefix) :])
        ours = ("tools", "python", "cache", "venvs", "blobs", "refs", "units", "secrets", "proxies", "staging")
        for name in ours:
            files.discard(store.path(name), store.path(".%s.gone" % name))
        files.remove_tree(store.path("bin"))  # the last: a machine without podctl is taken to have nothing of ours
        left = files.listed(store.root)
        for name in os.listdir(store.root):
            if name.startswith(".lock-"):
                files.unlink(store.path(name))  # of runs that were killed
    if left:
        say("%s holds files that are not ours, so it stays: %s" % (store.root, ", ".join(left)))
    files.remove_if_empty(store.root)
    return {"removed": True, "left": left}


def verb_leave(store: Store, options: Any) -> Document:
    """Takes an engine off the pod and all that is there for it, and everything of ours if nobody else uses the pod."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"removed": True, "left": []}
    with store.lock_engine(engine, "leave"), store.lock("leave"):
        forget_engine(store, engine)
        secret_files.drop_secrets(
            store,
            [
                *(
                    secret_files.secrets_file(store, engine, revision)
                    for revision in secret_files.revisions(store, engine)
                ),
                *(secret_files.tls_key_file(store, engine, name) for name in secret_files.tls_keys(store, engine)),
            ],
        )
        for stack, base in sorted({(ref.stack, ref.base) for ref in store.refs() if ref.base is not None}):
            if engine_of(stack, base) == engine:
                blobs.drop_refs(store, stack, base, keep=set())
        blobs.collect(store)
    return verb_remove(store, options)
