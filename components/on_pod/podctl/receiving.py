"""Bundles that arrive on stdin: what is missing, whether there is room, and the bytes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import threading
from typing import Any, Callable, Iterator, Mapping, Optional, TypeVar

from . import blobs, files, part
from .documents import Document, field, optional
from .names import hex_of
from .said import Refusal, human, say, shown
from .store import Store

T = TypeVar("T")

F_SETPIPE_SZ = 1031  # linux/fcntl.h; Python has its name since 3.10
SPARE_BYTES = 64 * 1024 * 1024  # left free on the disk by an upload
# Half of the longest that a silent sender is waited for: less than others wait for its lock. A connection may end
# without a word, as of a laptop that slept.
STALL_SECONDS = 150.0


def take(store: Store, stream: Incoming, hexdigest: str, size: int, offset: int) -> int:
    """Takes one bundle's bytes from `stream` into its part: those after `offset`, up to `size`.

    The caller holds the bundle's lock. The first `offset` bytes must be here from an earlier try. What arrives is kept
    for the next try, but not bytes of another digest, nor on a full disk.
    -> bytes taken
    """
    with part.opened(store, hexdigest, size) as arriving:
        here = part.arrived(store, hexdigest, size)
        if offset < here <= size:  # somebody else's, who came further meanwhile
            stream.skip(here - offset)
            offset = here
        arriving.begin(offset)
        why = "the connection ended"
        try:
            pump(stream, arriving, size - offset)
        except Silence:
            why = "nothing came for %d seconds" % STALL_SECONDS
        if arriving.at < size:
            arriving.keep()  # of a whole bundle the blob will be
            raise Refusal(
                "%s after %d of %d bytes of sha256:%s: they are kept, run this again"
                % (why, arriving.at, size, hexdigest)
            )
    if not arriving.is_right():
        raise Refusal(
            "the %d bytes that arrived as sha256:%s have the digest sha256:%s: they are thrown away, run this again"
            % (arriving.at, hexdigest, arriving.digest.hexdigest())
        )
    return arriving.at - offset


class Silence(Refusal):
    def __init__(self) -> None:
        super().__init__("nothing came for %d seconds: run this again" % STALL_SECONDS)


class Incoming:
    """What comes on stdin. While `attended`, by the main thread, its reads raise Silence where nothing does for long.

    One timer looks now and then whether it is still the same read: none of them needs one of its own.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.reads = 0
        self.reading = self.silent = False
        self.seen: Optional[int] = None  # which read there was at the last look

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self.look)
        signal.setitimer(signal.ITIMER_REAL, STALL_SECONDS, STALL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def look(self, *_: object) -> None:
        if self.reading and self.seen == self.reads:
            raise Silence
        self.seen = self.reads if self.reading else None

    def _read(self, how: Callable[..., T], *arguments: Any) -> T:
        self.reading = True
        try:
            return how(*arguments)
        finally:
            self.reading = False
            self.reads += 1

    def readinto(self, view: memoryview) -> int:
        """Fills `view`, or as much as comes before the end. Silence is told once what came before it is taken."""
        filled = 0
        if self.silent:
            raise Silence
        try:
            while filled < len(view):
                count = self._read(self.stream.readinto1, view[filled:])
                if not count:
                    break
                filled += count
        except Silence:
            if not filled:
                raise
            self.silent = True
        return filled

    def line(self) -> bytes:
        return bytes(self._read(self.stream.readline))

    def is_over(self) -> bool:
        return not self._read(self.stream.read, 1)

    def skip(self, count: int) -> None:
        """Reads past the bytes of a bundle that is here already."""
        while count > 0:
            piece = self._read(self.stream.read1, min(files.PIECE, count))
            if not piece:
                return
            count -= len(piece)


def is_here(store: Store, hexdigest: str, size: int) -> bool:
    """Whether a bundle is unpacked, or a whole tar of it waits for `place`."""
    return store.has_blob(hexdigest, size) or store.staged_bytes(hexdigest) == size


def pump(stream: Any, arriving: part.Part, limit: int) -> int:
    """Takes what comes, up to `limit` bytes. -> how many came"""
    total = 0
    for view in itertools.cycle([memoryview(bytearray(files.PIECE)) for _ in range(part.Digest.WAITING + 2)]):
        if total >= limit:
            break
        count = stream.readinto(view[: limit - total])
        if not count:
            break
        arriving.take(view[:count])
        total += count
    return total


def verb_missing(store: Store, document: Document) -> Document:
    """Which bundles must be sent, from which byte on; all are promised to the `place` of this `engine` that follows."""
    sizes = {}
    for digest, size in sorted(field(document, "bundles", dict).items()):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise Refusal("the document's size of %s must be a number of bytes" % shown(digest))
        sizes[hex_of(digest)] = size
    engine = optional(document, "engine", str)
    store.make_staging()
    with store.lock("missing"):
        missing = {}
        for hexdigest, size in sizes.items():
            # Also of what is yet to come: another stack may place it first, and let it go again.
            with open(store.claim(hexdigest, engine), "wb"):  # a power cut ends the promise: so be it
                pass
            if store.has_blob(hexdigest, size):
                continue
            if store.staged_bytes(hexdigest) == size:
                os.utime(store.staged(hexdigest))
                continue
            part.renew(store, hexdigest)
            here = part.arrived(store, hexdigest, size)
            missing[hexdigest] = here if here <= size else 0
    free = check_room(store, sizes)
    return {"missing": {"sha256:" + h: offset for h, offset in missing.items()}, "freeBytes": free}


def check_room(store: Store, bundles: Mapping[str, int]) -> int:
    """Refuses bundles of these sizes where the disk cannot take what is still to come of them.

    Those that are tars are unpacked one after the other, each tar going when its blob is there.
    -> the bytes that are free
    """
    disk = os.statvfs(store.root)
    free = disk.f_bavail * disk.f_frsize
    sizes = {hexdigest: size for hexdigest, size in bundles.items() if not store.has_blob(hexdigest, size)}
    coming, largest_tar = 0, 0
    for hexdigest, size in sizes.items():
        whole = store.staged_bytes(hexdigest) == size
        if not whole:
            coming += max(0, size - part.on_disk(store, hexdigest))
        if whole or part.stays_tar(store, hexdigest):
            largest_tar = max(largest_tar, size)
    needed = coming + largest_tar
    if needed and needed + SPARE_BYTES > free:
        raise Refusal(
            "the disk of %s has %s free and the bundles need %s, and %s must stay free: make room there, or use a "
            "larger disk" % (store.root, human(free), human(needed), human(SPARE_BYTES))
        )
    inodes = 5 * len(sizes) + 105
    if sizes and disk.f_files and inodes > disk.f_favail:
        raise Refusal(
            "the disk of %s has %d inodes free and the bundles need %d: remove files there"
            % (store.root, disk.f_favail, inodes)
        )
    return free


def verb_receive_all(store: Store, options: Any) -> Document:
    """A line of JSON saying which bundles come, then their bytes, one after the other; each is unpacked meanwhile."""
    with contextlib.suppress(OSError):  # so that sshd decrypts on while this writes
        fcntl.fcntl(options.stdin.fileno(), F_SETPIPE_SZ, files.PIECE)
    stream = Incoming(options.stdin)
    with stream.attended():
        return receive_all(store, stream)


def receive_all(store: Store, stream: Incoming) -> Document:
    try:
        document = json.loads(stream.line().decode("utf-8"))
    except ValueError:
        raise Refusal("the first line on stdin is not JSON") from None
    plan = []
    for bundle in field(document, "bundles", list):
        size, offset = field(bundle, "size", int), field(bundle, "offset", int)
        if not 0 <= offset <= size:
            raise Refusal("the document's offset %d is not within a bundle of %d bytes" % (offset, size))
        plan.append((hex_of(field(bundle, "digest", str)), size, offset))
    store.make_staging()
    check_room(store, {hexdigest: size for hexdigest, size, _ in plan})
    received = dict.fromkeys(("sha256:" + hexdigest for hexdigest, _, _ in plan), 0)
    with Unpacking(store) as unpacking:
        for hexdigest, size, offset in plan:
            with contextlib.ExitStack() as held:
                held.enter_context(store.hold("receive", store.staged(hexdigest, ".lock")))
                if is_here(store, hexdigest, size):
                    stream.skip(size - offset)
                else:
                    received["sha256:" + hexdigest] = take(store, stream, hexdigest, size, offset)
                    unpacking.end()
                    unpacking.begin(hexdigest, size, held.pop_all())
                    continue
            say("sha256:%s is here (%s)" % (hexdigest, human(size)))
        if not stream.is_over():
            raise Refusal("more bytes arrived than the %d bundles declared" % len(plan))
    return {"received": received}


class Unpacking:
    """Unpacks a bundle on a thread of its own: waiting for the disk would hold up the bytes of the next one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.thread: Optional[threading.Thread] = None
        self.error: Optional[BaseException] = None

    def begin(self, hexdigest: str, size: int, held: contextlib.ExitStack) -> None:
        """`held` is the bundle's lock, which goes when it is unpacked."""
        thread = threading.Thread(target=self.work, args=(hexdigest, size, held))
        try:
            thread.start()
        except BaseException:
            held.close()
            raise
        self.thread = thread

    def work(self, hexdigest: str, size: int, held: contextlib.ExitStack) -> None:
        try:
            with held:
                blobs.unpack_arrived(self.store, hexdigest, size)
            say("sha256:%s is here (%s)" % (hexdigest, human(size)))
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Waits for the bundle at hand. Raises what went wrong with it."""
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> "Unpacking":
        return self

    def __exit__(self, kind: object, raised: object, *_: object) -> None:
        if kind is None:
            self.end()
            return
        if self.thread is not None:
            self.thread.join()
        if self.error is not None and self.error is not raised:
            say(files.of_the_disk(self.store.root, self.error) or str(self.error) or repr(self.error))
