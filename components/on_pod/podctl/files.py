"""Files and locks: each change whole or not at all, also after a power cut; what is said of a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import Iterator, List, Optional, Tuple

from .said import AGAIN, Refusal, clean, say

PIECE = 1024 * 1024  # bytes read, hashed and written at a time
LOCK_SECONDS = 600.0


def fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def make_dirs(path: str, mode: int = 0o755) -> None:
    """Makes a directory, and those above it, so that a power cut takes away none that holds something."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_dirs(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode)
    fsync_dir(parent)


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Puts `data` at `path`: the old bytes or the new ones, never less, also after a power cut."""
    directory, name = os.path.split(path)
    make_dirs(directory)
    aside = os.path.join(directory, ".%s.aside" % name)
    unlink(aside)  # of a run that was killed
    with no_remains(aside):
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(aside, path)
    fsync_dir(directory)


def read_file(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def unlink(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
        return True
    return False


def listed(path: str) -> List[str]:
    """The names in a directory, sorted, without what is being written aside; none where there is no directory."""
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def names_in(path: str) -> List[str]:
    """All that is in a directory, sorted; nothing where it went meanwhile."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def remove_tree(path: str) -> None:
    """Removes a directory with all that is in it; of a link, only the link."""
    import shutil

    if os.path.islink(path):
        os.unlink(path)
        return
    for directory, _, _ in os.walk(path):
        os.chmod(directory, 0o700)  # blobs are read-only, which stops anyone but root from emptying them
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def discard(path: str, aside: str) -> None:
    """Takes a directory out of sight in one step, then empties it: nobody sees half of it, also after a power cut."""
    remove_tree(aside)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        fsync_dir(os.path.dirname(path))
        remove_tree(aside)


def remove_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)
        fsync_dir(os.path.dirname(path))


def try_lock(path: str) -> Tuple[Optional[int], str]:
    """(descriptor, "") of the lock now held, or (None, who holds it)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None, ""  # a `remove` just took its directory
    holder = ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder removes the file when it is done: only a lock on the one that is still there counts.
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd, ""
    except BlockingIOError:
        holder = os.pread(fd, 400, 0).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        pass
    os.close(fd)
    return None, holder


def holder_of(path: str) -> str:
    """Who holds the lock at `path`; "" where nobody does. Takes it from nobody."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return clean(os.pread(fd, 400, 0).decode("utf-8", "replace").strip()) or "another podctl"
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold(path: str, purpose: str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds the lock at `path`, waiting up to `seconds` and saying so once. It dies with the process."""
    deadline = time.monotonic() + seconds
    said = False
    while True:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # each time: who is waited for may be a `remove`
        fd, holder = try_lock(path)
        if fd is not None:
            break
        if time.monotonic() > deadline:
            raise Refusal(
                "another podctl (%s) holds %s and did not let go of it for %d seconds: run this again when it is done; "
                "if it hangs, end that process on the pod" % (holder, path, seconds)
            )
        if holder and not said:
            say("waiting for another podctl (%s)" % holder)
            said = True
        time.sleep(0.1)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with contextlib.suppress(OSError):  # on a full disk it is held without a name: gc must run there, and leave
            os.ftruncate(fd, 0)  # a holder that was killed left its name
            os.pwrite(fd, ("pid %d, %s, since %s" % (os.getpid(), purpose, since)).encode("utf-8"), 0)
        yield
    finally:
        unlink(path)
        os.close(fd)


def of_the_disk(root: str, error: BaseException) -> str:
    """What is said of a disk that takes nothing more, "" of any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ""
    if error.errno == errno.EROFS:
        where = error.filename if isinstance(error.filename, str) else root
        return "the disk of %s is read-only: find out why (dmesg), make it writable, and %s" % (where, AGAIN)
    disk = os.statvfs(existing_parent(root))
    if disk.f_files and disk.f_favail < 10:
        return "the disk of %s has %d inodes left: remove files there, and %s" % (root, disk.f_favail, AGAIN)
    return "the disk of %s is full: make room there, or use a larger disk, and %s" % (root, AGAIN)


@contextlib.contextmanager
def no_remains(path: str) -> Iterator[None]:
    """Removes what was begun at `path` where the disk takes no more: whoever runs there needs what is left of it."""
    try:
        yield
    except OSError as error:
        if of_the_disk(os.path.dirname(path), error):
            with contextlib.suppress(OSError):
                remove_tree(path) if os.path.isdir(path) else unlink(path)
        raise


def existing_parent(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
