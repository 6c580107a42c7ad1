"""Blobs: unpacked, referred to by models, verified, and collected once nothing needs them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from typing import Any, Dict, List, Set

from . import files, part, tars, units, waiting
from .documents import Document, field
from .names import BLOB_PATH, engine_of, hex_of, name_of
from .said import Refusal, few, named, say
from .store import Ref, Store
from .tars import Member

SAID_ONE_BY_ONE = 10
STALE_SECONDS = 7 * 86400.0  # an abandoned upload is kept this long for resuming


def needed_by(store: Store) -> Dict[str, Set[str]]:
    """Who needs which blobs: models, units that are installed or kept, and what runs, whatever its unit says now."""
    found: Dict[str, Set[str]] = {}
    for ref in store.refs():
        found.setdefault("model %s of stack %s" % (ref.model, ref.stack), set()).add(hex_of(ref.digest))
    texts = [
        (name, os.path.join(store.units_dir, name))
        for name in files.listed(store.units_dir)
        if name.startswith("lora-pods-") and name.endswith(".service")
    ]
    for engine in files.listed(store.path("units")):
        for n in files.listed(store.path("units", engine)):
            kept = "generation %s of engine %s" % (n, engine)
            texts += [(kept, store.path("units", engine, n, name)) for name in ("unit", "doc.json")]
    texts += [("process %s" % pid, "/proc/%s/cmdline" % pid) for pid in files.listed("/proc") if pid.isdigit()]
    for who, path in texts:
        with contextlib.suppress(ProcessLookupError):
            text = (files.read_file(path) or b"").decode("utf-8", "replace")
            for hexdigest in BLOB_PATH.findall(text):
                found.setdefault(who, set()).add(hexdigest)
    return found


def collect(store: Store) -> List[str]:
    """Removes the blobs nothing needs and what was abandoned in staging. -> the digests that went."""
    needed = set().union(*needed_by(store).values())
    for name in files.listed(store.path("staging")):
        path = store.path("staging", name)
        match = re.fullmatch(
            r"([0-9a-f]{64})\.(tar|tar\.part|part|weights|lock|new|gone|altered|(?:[0-9a-f]{12}\.)?claim)", name
        )
        if match is None:
            continue
        if match.group(2) == "altered":
            if not os.path.isdir(store.blob(match.group(1))):
                files.unlink(path)
            continue
        if match.group(2) in ("tar.part", "part", "lock"):
            if all(is_stale(store.staged(match.group(1), suffix)) for suffix in (part.TAR, part.APART, ".lock")):
                part.sweep(store, match.group(1))
        elif is_stale(path) or match.group(2) in ("new", "gone"):
            files.remove_tree(path) if os.path.isdir(path) else files.unlink(path)
        elif match.group(2).endswith("claim"):
            needed.add(match.group(1))

    gone = [name for name in store.blobs() if name not in needed]
    for name in gone:
        discard_blob(store, name)
    return ["sha256:" + name for name in gone]


def is_stale(path: str) -> bool:
    """Whether nothing was done at `path` for long, or nothing is there."""
    try:
        return time.time() - os.lstat(path).st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return True


def discard_blob(store: Store, hexdigest: str) -> None:
    """Takes a blob out of sight in one step, then empties it."""
    aside = store.staged(hexdigest, ".gone")
    store.make_staging()
    # Moving a directory needs write permission on it. Others may read it still: a run that is killed here leaves a blob
    # that the next one takes for whole.
    os.chmod(store.blob(hexdigest), 0o755)
    files.discard(store.blob(hexdigest), aside)
    files.unlink(store.staged(hexdigest, ".altered"))


def unpack(store: Store, hexdigest: str) -> bool:
    """Makes the blob of the staged bundle. -> False where there was nothing to do.

    The digest first, then every header, then a second opinion; only then is anything written, and the blob appears
    whole. A tar that is refused is removed.
    """
    path = store.staged(hexdigest)
    try:
        tar = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        if store.has_blob(hexdigest):
            return False
        raise Refusal("sha256:%s is not on this pod: send it first" % hexdigest) from None
    try:
        digest = hashlib.sha256()
        tars.hash_file(tar, digest)
        return unpack_tar(store, hexdigest, path, tar, digest.hexdigest())
    finally:
        os.close(tar)


def unpack_arrived(store: Store, hexdigest: str, size: int) -> None:
    """Makes the blob of a part that has all its bytes and, as its receiver found, the right digest.

    The receiver holds the bundle's lock. Until the blob is placed, the promise of `missing` keeps it.
    """
    path, apart = store.staged(hexdigest, part.TAR), store.staged(hexdigest, part.APART)
    shape = part.shape_here(store, hexdigest, size)
    if shape is None:
        # What finds no room beside its tar would find none the next time: it comes again.
        with store.lock("unpack"), files.no_remains(path), open(path, "rb") as tar:
            unpack_tar(store, hexdigest, path, tar.fileno(), hexdigest)
        return

    config, weights = (os.path.join(apart, member) for member in tars.MEMBERS)
    with part.or_dropped(store, hexdigest), open(path, "rb") as tar:  # not while others wait for the lock
        files.unlink(config)  # a run that was killed may have left it
        write_member(tar.fileno(), Member(tars.MEMBERS[0], tars.BLOCK, shape.config), apart)
        os.chmod(weights, 0o444)
        files.fsync_file(weights)
        files.fsync_dir(apart)
    with store.lock("unpack"):
        if not store.has_blob(hexdigest, size):
            make_blob(store, hexdigest, apart)
    part.drop(store, hexdigest)


def unpack_tar(store: Store, hexdigest: str, path: str, tar: int, found: str) -> bool:
    size = os.fstat(tar).st_size
    if store.has_blob(hexdigest, size):
        files.unlink(path)
        return False
    try:
        if found != hexdigest:
            raise Refusal("its digest is sha256:%s" % found)
        members = tars.read_tar(tar, size)
        tars.check_with_tarfile(path, members, store.blob(hexdigest))
        if not tars.is_own(tar, size, members):
            raise Refusal(
                "it is written otherwise than lora-pods writes a bundle; if it came from a store, remove the object "
                "there, then run `lora push`"
            )
    except Refusal as refusal:
        files.unlink(path)
        raise Refusal("sha256:%s is refused and removed: %s" % (hexdigest, refusal)) from None

    aside = store.staged(hexdigest, ".new")
    files.remove_tree(aside)
    with files.no_remains(aside):
        os.mkdir(aside, 0o755)
        for member in members:
            write_member(tar, member, aside)
        files.fsync_dir(aside)
    make_blob(store, hexdigest, aside)
    files.unlink(path)
    return True


def write_member(tar: int, member: Member, directory: str) -> None:
    fd = os.open(os.path.join(directory, member.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        tars.copy_range(tar, member.offset, fd, member.size)
        os.fchmod(fd, 0o444)
        os.fsync(fd)
    finally:
        os.close(fd)


def make_blob(store: Store, hexdigest: str, aside: str) -> None:
    """Makes a blob of a directory in staging, which has both files, read-only, and is fsynced with them."""
    blob = store.blob(hexdigest)
    files.make_dirs(os.path.dirname(blob))
    if os.path.lexists(blob):
        # It lost a file or a part of one, or was altered: has_blob said so. Marked first: where a run is killed in
        # between, no blob tells the next one that engines hold what was there.
        units.mark_stale(store, "blobs/sha256/" + hexdigest)
        discard_blob(store, hexdigest)
    files.unlink(store.staged(hexdigest, ".altered"))  # a run that was killed may have left it
    os.rename(aside, blob)
    os.chmod(blob, 0o555)  # after the rename: moving a directory needs write permission on it
    files.fsync_dir(os.path.dirname(blob))
    files.unlink(store.staged(hexdigest, ".altered"))
    files.fsync_dir(store.path("staging"))  # before the tar goes: a mark that came back would ask for it again


def verb_place(store: Store, document: Document) -> Document:
    """Makes exactly these models of one base this stack's."""
    stack = name_of(field(document, "stack", str), "stack")
    base = field(document, "base", str)
    wanted = {name_of(model, "model"): hex_of(digest) for model, digest in field(document, "models", dict).items()}
    store.make_staging()
    with store.lock("place"):
        for model, hexdigest in sorted(wanted.items()):
            if not store.has_blob(hexdigest) and store.staged_bytes(hexdigest) is None:
                raise Refusal(
                    "sha256:%s, the adapter of model %s, is not on this pod: it must be sent first" % (hexdigest, model)
                )
        unpacked, due = [], time.monotonic() + waiting.SAY_SECONDS
        for done, hexdigest in enumerate(sorted(set(wanted.values())), 1):
            if unpack(store, hexdigest):
                unpacked.append("sha256:" + hexdigest)
                if len(unpacked) <= SAID_ONE_BY_ONE:
                    say("sha256:%s is unpacked" % hexdigest)
                elif time.monotonic() > due:
                    say("%d of %d bundles are unpacked" % (done, len(set(wanted.values()))))
                    due = time.monotonic() + waiting.SAY_SECONDS
        for model, hexdigest in sorted(wanted.items()):
            store.set_ref(Ref(stack, model, "sha256:" + hexdigest, base))
        dropped = drop_refs(store, stack, base, keep=set(wanted))
        for hexdigest in wanted.values():
            part.sweep(store, hexdigest)
            for whose in (engine_of(stack, base), None):
                files.unlink(store.claim(hexdigest, whose))
        collected = collect(store)
    return {"unpacked": few(unpacked), "dropped": few(dropped), "collected": few(collected)}


def drop_refs(store: Store, stack: str, base: str, keep: Set[str]) -> List[str]:
    gone = [ref for ref in store.refs() if (ref.stack, ref.base) == (stack, base) and ref.model not in keep]
    for ref in gone:
        files.unlink(store.path("refs", stack, ref.model))
    if gone:
        files.fsync_dir(store.path("refs", stack))  # before what they held goes
    files.remove_if_empty(store.path("refs", stack))
    return [ref.model for ref in gone]


def verb_unplace(store: Store, options: Any) -> Document:
    """Drops the references of a stack to the adapters of a base."""
    if not os.path.isdir(store.root):
        return {"dropped": [], "collected": []}
    with store.lock("unplace"):
        dropped = drop_refs(store, name_of(options.stack, "stack"), options.base, keep=set())
        return {"dropped": few(dropped), "collected": few(collect(store))}


def verb_gc(store: Store, options: Any) -> Document:
    """Removes blobs that nothing refers to, and abandoned uploads."""
    if not os.path.isdir(store.root):
        return {"collected": []}
    with store.lock("gc"):
        return {"collected": collect(store)}


def verb_verify(store: Store, options: Any) -> Document:
    """Hashes every blob again, as the bundle it came from, and names what rotted and who needs it. Changes nothing."""
    result: Dict[str, List[str]] = {"ok": [], "rotten": [], "strays": []}
    for name in store.blobs():
        blob = store.blob(name)
        result["strays"] += [os.path.join(blob, other) for other in strays(blob)]
        why = rot_of(store, name)
        if not why:
            result["ok"].append("sha256:" + name)
        elif os.path.isdir(blob):  # else it was collected meanwhile
            result["rotten"].append("sha256:" + name)
            users = [place for place, digests in needed_by(store).items() if name in digests]
            say(
                "sha256:%s is rotten: %s; %s" % (name, why, "needed by " + named(users) if users else "nobody needs it")
            )
    if result["rotten"]:
        say("to mend them: rm -r what is rotten in %s, then pulumi up --refresh" % store.path("blobs", "sha256"))
    for path in result["strays"]:
        say("%s is not ours and is left alone" % path)
    return {**result}


def rot_of(store: Store, name: str) -> str:
    """What is wrong with a blob, "" if nothing."""
    try:
        if tars.tar_size(store.blob(name)) is None:
            return "a file of it is missing"
        found = tars.hash_blob(store.blob(name))
    except OSError as error:
        return "it cannot be read (%s)" % (error.strerror or error)
    return "" if found == name else "its bytes have the digest sha256:%s" % found


def strays(blob: str) -> List[str]:
    """What lies in a blob and is not of it. vLLM may load it: a tokenizer, say."""
    return [name for name in files.names_in(blob) if name not in tars.MEMBERS]


def is_whole(store: Store, hexdigest: str) -> bool:
    """Whether a blob is what its name says, and nothing more; bytes that cannot be read are not."""
    try:
        return not strays(store.blob(hexdigest)) and tars.hash_blob(store.blob(hexdigest)) == hexdigest
    except OSError:
        return False
