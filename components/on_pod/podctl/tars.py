"""A bundle as a tar: which are taken, and what an unpacked one measures and hashes to as one."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
from typing import Any, List, NamedTuple, Optional, Sequence

from . import files
from .said import Refusal, clean, shown

MEMBERS = ("adapter_config.json", "adapter_model.safetensors")  # what vLLM's loader reads, sorted bytewise
BLOCK = 512  # of a tar


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


class Member(NamedTuple):
    name: str
    offset: int  # of its bytes in the tar
    size: int


class Shape(NamedTuple):
    """What the tar of a bundle is made of, in bytes, where it is in the program's own form."""

    config: int
    start: int  # of the weights
    weights: int

    @property
    def size(self) -> int:
        return self.start + padded(self.weights) + 2 * BLOCK


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


def is_own(fd: int, size: int, members: Sequence[Member]) -> bool:
    """Whether a tar that `read_tar` took is the one that a blob of its files measures and hashes as."""
    config, weights = members
    shape = Shape(config.size, 2 * BLOCK + padded(config.size), weights.size)
    return (config.offset, weights.offset, size) == (BLOCK, shape.start, shape.size) and all(
        os.pread(fd, BLOCK, member.offset - BLOCK) == ustar_header(member.name, member.size) for member in members
    )


def check_end(fd: int, position: int, size: int) -> None:
    """After the last member: two blocks of zeros, then nothing but more of them."""
    if size - position < 2 * BLOCK or size % BLOCK:
        raise Refusal("the tar ends at byte %d without its closing blocks: it is cut short" % size)
    while position < size:
        piece = os.pread(fd, files.PIECE, position)
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


def hash_file(fd: int, digest: Any) -> int:
    """Feeds the file's bytes to `digest`. -> how many there were."""
    position = 0
    while True:
        piece = os.pread(fd, files.PIECE, position)
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
        piece = os.pread(source, min(files.PIECE, size - done), offset + done)
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


def shape_of(beginning: bytes) -> Optional[Shape]:
    """The shape of a tar that begins as the program's own do, byte for byte up to the weights; None of any other, and
    where that is not here yet."""
    config = octal(beginning[124:136]) or 0
    start = BLOCK + padded(config) + BLOCK
    weights = octal(beginning[start - BLOCK + 124 : start - BLOCK + 136])
    if weights is None or len(beginning) < start:
        return None
    head = ustar_header(MEMBERS[0], config) + beginning[BLOCK : BLOCK + config]
    if beginning[:start] != head + bytes(padded(config) - config) + ustar_header(MEMBERS[1], weights):
        return None
    return Shape(config, start, weights)


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
