"""A bundle on its way: how much of it is here, and where its bytes go.

A tar in the program's own form is taken apart as it comes: the weights' bytes go into the file that the blob will have,
so that none is written twice. One with a long head stays a tar until it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import threading
from typing import Any, Iterator, Optional

from . import files, tars
from .said import Refusal
from .store import Store

TAR = ".tar.part"  # of a tar that is taken apart: what comes before the weights
APART = ".part"  # the directory that will be the blob
WEIGHTS = os.path.join(APART, tars.MEMBERS[1])
TO_DISK = 8 * 1024 * 1024  # bytes of the weights that go to the disk at a time
HEAD_MOST = files.PIECE  # bytes; a tar with more of them before its weights is not taken apart
KILLED_WITH = HEAD_MOST + files.PIECE  # bytes; the tar of one that was killed as it was about to be taken apart


class Digest:
    """SHA-256 on a thread of its own, so that one core hashes what came while another takes what comes."""

    WAITING = 2  # pieces, beside the one that is hashed

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.pieces: "queue.Queue[Any]" = queue.Queue(self.WAITING)
        self.thread: Optional[threading.Thread] = None

    def update(self, piece: Any) -> None:
        """Takes a piece whose bytes stay as they are until WAITING + 1 more were taken, or the end."""
        if self.thread is None:
            thread = threading.Thread(target=self.work, daemon=True)
            thread.start()
            self.thread = thread
        self.pieces.put(piece)

    def work(self) -> None:
        for piece in iter(self.pieces.get, None):
            self.sha256.update(piece)

    def end(self) -> None:
        if self.thread is not None:
            self.pieces.put(None)
            self.thread.join()
            self.thread = None

    def hexdigest(self) -> str:
        self.end()
        return self.sha256.hexdigest()


class Part:
    """What is here of a bundle, whose lock the caller holds. `begin` comes first."""

    at: int  # how many bytes are here
    digest: Digest  # of these
    to_disk: int  # bytes of the weights that are on the disk, or on their way there
    hides: bool  # bytes behind the weights, where a bundle has zeros

    def __init__(self, store: Store, hexdigest: str, size: int, held: contextlib.ExitStack) -> None:
        self.store, self.hexdigest, self.size, self.held = store, hexdigest, size, held
        self.shape: Optional[tars.Shape] = None
        self.weights: Any = None
        self.digest = Digest()
        self.tar = self.file(TAR)

    def file(self, suffix: str) -> Any:
        return self.held.enter_context(open(self.store.staged(self.hexdigest, suffix), "a+b", buffering=0))

    def begin(self, at: int) -> None:
        """Keeps the first `at` bytes and forgets the others. Refuses where there are fewer."""
        if at > arrived(self.store, self.hexdigest, self.size):
            raise Refusal("sha256:%s has fewer than %d bytes here: ask again what is missing" % (self.hexdigest, at))
        self.digest.end()
        if self.shape is not None:
            self.weights.close()  # what is removed below would keep its room
        self.at, self.to_disk, self.hides, self.digest = at, 0, False, Digest()
        self.held.callback(self.digest.end)
        self.shape = shape_here(self.store, self.hexdigest, self.size)
        renew(self.store, self.hexdigest)
        if self.shape is not None and at >= self.shape.start:
            self.tar.truncate(self.shape.start)
            self.open_weights()
            self.weights.truncate(min(at - self.shape.start, self.shape.weights))
        else:
            self.tar.truncate(at)
            self.shape = None
            files.remove_tree(self.store.staged(self.hexdigest, APART))
        here = tars.hash_file(self.tar.fileno(), self.digest)
        if self.shape is not None:
            here += tars.hash_file(self.weights.fileno(), self.digest)
        elif at <= KILLED_WITH:
            self.take_apart()
        self.digest.update(bytes(at - here))  # behind the weights are only zeros

    def open_weights(self) -> None:
        path = self.store.staged(self.hexdigest, WEIGHTS)
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o755)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(path, 0o600)  # who was killed may have made them read-only, which root alone would not notice
        self.weights = self.file(WEIGHTS)

    def take(self, view: memoryview) -> None:
        """Adds the bytes that came."""
        self.digest.update(view)
        begin, self.at = self.at, self.at + len(view)
        if self.shape is not None:
            self.put(self.shape, begin, view)
            return
        write(self.tar, view)
        if begin < HEAD_MOST:
            self.take_apart()

    def take_apart(self) -> None:
        """Moves what is in the tar of the weights to their file, once what is there says where they begin."""
        shape = shape_of(self.tar.fileno(), self.size)
        if shape is not None:
            self.open_weights()
            came = os.pread(self.tar.fileno(), self.at - shape.start, shape.start)
            self.put(shape, shape.start, memoryview(came))
            self.tar.truncate(shape.start)
            self.shape = shape

    def put(self, shape: tars.Shape, begin: int, view: memoryview) -> None:
        of_weights = max(0, shape.start + shape.weights - begin)
        write(self.weights, view[:of_weights])
        came = min(self.at - shape.start, shape.weights)
        if came - self.to_disk >= TO_DISK:
            if not self.to_disk:
                with or_dropped(self.store, self.hexdigest):
                    os.fsync(self.tar.fileno())  # without it the weights are nobody's after a power cut
            # What is on its way to the disk already need not be waited for at the end. It is what this does to pages
            # that were just written, which stay in memory.
            os.posix_fadvise(self.weights.fileno(), self.to_disk, came - self.to_disk, os.POSIX_FADV_DONTNEED)
            self.to_disk = came
        self.hides = self.hides or any(view[of_weights:])

    def is_right(self) -> bool:
        """Whether all the bytes that came have the digest. Those of another are thrown away.

        Raises Refusal where they have it and are no bundle.
        """
        if self.digest.hexdigest() == self.hexdigest and not self.hides:
            return True
        drop(self.store, self.hexdigest)
        if self.digest.hexdigest() == self.hexdigest:
            raise Refusal(
                "sha256:%s is refused and removed: the tar goes on after the end of its weights" % self.hexdigest
            )
        return False

    def keep(self) -> None:
        """Makes what is here outlast a power cut."""
        with or_dropped(self.store, self.hexdigest):
            os.fsync(self.tar.fileno())
            if self.shape is not None:
                os.fsync(self.weights.fileno())
                files.fsync_dir(self.store.staged(self.hexdigest, APART))
            files.fsync_dir(self.store.path("staging"))


@contextlib.contextmanager
def or_dropped(store: Store, hexdigest: str) -> Iterator[None]:
    """Forgets a part that did not get to the disk: the next fsync would say nothing of what this one lost."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            drop(store, hexdigest)
        raise


@contextlib.contextmanager
def opened(store: Store, hexdigest: str, size: int) -> Iterator[Part]:
    """The part of a bundle of `size` bytes, some of which may be here. Gives back what it took of a full disk."""
    with contextlib.ExitStack() as held:
        for suffix in (TAR, APART):
            held.enter_context(files.no_remains(store.staged(hexdigest, suffix)))
        try:
            yield Part(store, hexdigest, size, held)
        except BaseException:
            if not arrived(store, hexdigest, size):
                drop(store, hexdigest)  # else an empty file would stay
            raise


def arrived(store: Store, hexdigest: str, size: int) -> int:
    """How many bytes of a bundle are here to go on from. Behind the weights are zeros, which need not come."""
    shape = shape_here(store, hexdigest, size)
    if shape is None:
        return store.staged_bytes(hexdigest, TAR) or 0
    weights = store.staged_bytes(hexdigest, WEIGHTS) or 0
    return shape.start + weights if weights < shape.weights else shape.size


def shape_here(store: Store, hexdigest: str, size: int) -> Optional[tars.Shape]:
    """The shape of a part that is taken apart, None of any other."""
    if store.staged_bytes(hexdigest, WEIGHTS) is None:
        return None
    with contextlib.suppress(FileNotFoundError), open(store.staged(hexdigest, TAR), "rb") as tar:
        shape = shape_of(tar.fileno(), size)
        # Who was killed as it took it apart left weights in the tar, and perhaps not as many in their file.
        return shape if shape is not None and os.fstat(tar.fileno()).st_size <= shape.start else None
    return None


def shape_of(tar: int, size: int) -> Optional[tars.Shape]:
    shape = tars.shape_of(os.pread(tar, HEAD_MOST, 0))
    return shape if shape is not None and shape.size == size else None


def on_disk(store: Store, hexdigest: str) -> int:
    """How many bytes a part takes there, also what nothing can go on from: that goes when the bundle comes."""
    return sum(store.staged_bytes(hexdigest, suffix) or 0 for suffix in (TAR, WEIGHTS))


def stays_tar(store: Store, hexdigest: str) -> bool:
    """Whether a part is a tar that is not taken apart any more: of a long head, or of an older podctl."""
    return store.staged_bytes(hexdigest, WEIGHTS) is None and on_disk(store, hexdigest) > KILLED_WITH


def renew(store: Store, hexdigest: str) -> None:
    """Keeps what is here from being abandoned."""
    for suffix in (TAR, APART):
        with contextlib.suppress(FileNotFoundError):
            os.utime(store.staged(hexdigest, suffix))


def sweep(store: Store, hexdigest: str) -> None:
    """Removes what is here, of which nobody is to go on: unless somebody does so now."""
    lock = store.staged(hexdigest, ".lock")
    if any(os.path.lexists(path) for path in (lock, *(store.staged(hexdigest, suffix) for suffix in (TAR, APART)))):
        held, _ = files.try_lock(lock)
        if held is not None:
            drop(store, hexdigest)
            files.unlink(lock)
            os.close(held)


def drop(store: Store, hexdigest: str) -> None:
    files.remove_tree(store.staged(hexdigest, APART))
    files.unlink(store.staged(hexdigest, TAR))


def write(file: Any, view: memoryview) -> None:
    written = 0
    while written < len(view):
        written += file.write(view[written:])
