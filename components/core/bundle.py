"""An adapter as one deterministic tar, produced as a stream.

The format is frozen, because the digest of its bytes is the adapter's identity everywhere: POSIX ustar
(IEEE Std 1003.1-1988), written by hand so that no library's version can change a byte. Members are what vLLM's
loader reads (``adapter.py`` cites it) and nothing else, sorted bytewise; mode 0644, uid and gid 0, no owner names,
mtime 0; no directory members, no compression, two zero blocks at the end and no further padding.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.core.adapter import CONFIG_NAME, WEIGHTS_NAME, Adapter, open_regular, shown_path
from components.core.errors import UserError, os_reason

BLOCK = 512
# What is larger than this comes from the system in pages that have to be cleared first, at every copy: sending it over
# SSH in pieces of 1 MiB takes half as much of a core again.
CHUNK = 128 * 1024
END_OF_ARCHIVE = bytes(2 * BLOCK)
LARGEST_MEMBER = 8**11 - 1  # 11 octal digits
LONGEST_NAME = 100

# name, mode, uid, gid, size, mtime, checksum, type, link name, magic, version, user, group, major, minor, prefix
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
_CHECKSUM_AT = 148


@dataclass(frozen=True)
class Member:
    """One file of a bundle: its name in the tar, where its bytes are, and how many."""

    name: str
    path: Path
    size: int


def bundle_members(adapter: Adapter) -> list[Member]:
    """The members of an adapter's bundle, in order.

    Raises:
        UserError: a file is gone, or larger than a tar member can be (8 GiB - 1).
    """
    members = []
    for name, path in sorted({CONFIG_NAME: adapter.config, WEIGHTS_NAME: adapter.weights}.items()):
        try:
            size = path.stat().st_size
        except OSError:
            raise _changed(path) from None
        if size > LARGEST_MEMBER:
            raise UserError(f"{shown_path(path)}: {size} bytes, and a file in a bundle may have {LARGEST_MEMBER}.")
        members.append(Member(name=name, path=path, size=size))
    return members


def bundle_size(members: Sequence[Member]) -> int:
    """Bytes of the tar; reads nothing."""
    return sum(BLOCK + member.size + _padding(member.size) for member in members) + len(END_OF_ARCHIVE)


def stream_bundle(members: Sequence[Member], chunk: int = CHUNK, start: int = 0) -> Generator[bytes, None, None]:
    """The tar's bytes from ``start`` on, in pieces of at most ``chunk`` bytes (headers are 512) that may be kept.

    Nothing before ``start`` is read.

    Raises:
        UserError: a file cannot be read, or changed while it was being read.
    """
    for piece in _pieces(members, chunk, start):
        yield bytes(piece)


def digest_bundle(members: Sequence[Member], counted: Callable[[int], None] | None = None) -> str:
    """``sha256:<hex>`` of the tar's bytes; ``counted`` is told of each piece how many they were.

    Raises:
        UserError: a file cannot be read, or changed while it was being read.
    """
    sha256 = hashlib.sha256()
    for piece in _pieces(members, CHUNK):
        sha256.update(piece)
        if counted:
            counted(len(piece))
    return f"sha256:{sha256.hexdigest()}"


def ustar_header(name: str, size: int) -> bytes:
    """The 512 bytes in front of a member."""
    encoded = name.encode("ascii")
    if len(encoded) > LONGEST_NAME or not 0 <= size <= LARGEST_MEMBER:
        raise ValueError(f"no ustar header for {name!r} with {size} bytes")
    header = _HEADER.pack(
        encoded,
        b"0000644",
        b"0000000",
        b"0000000",
        b"%011o" % size,
        b"%011o" % 0,
        b" " * 8,
        b"0",
        b"",
        b"ustar",
        b"00",
        b"",
        b"",
        b"0000000",
        b"0000000",
        b"",
    )
    checksum = b"%06o\0 " % sum(header)
    return header[:_CHECKSUM_AT] + checksum + header[_CHECKSUM_AT + len(checksum) :]


def _padding(size: int) -> int:
    return -size % BLOCK


def _changed(path: Path) -> UserError:
    return UserError(f"{shown_path(path)}: changed while it was being read; run again when nothing writes to it.")


def _pieces(members: Sequence[Member], chunk: int, start: int = 0) -> Iterator[bytes | memoryview]:
    """The tar from `start` on. A piece of a file is a view into one buffer, good until the next is asked for."""
    buffer = memoryview(bytearray(chunk))
    skip = start
    for member in members:
        if piece := ustar_header(member.name, member.size)[skip:]:
            yield piece
        skip = max(0, skip - BLOCK)
        yield from _file_pieces(member, buffer, min(skip, member.size))
        skip = max(0, skip - member.size)
        if piece := bytes(_padding(member.size))[skip:]:
            yield piece
        skip = max(0, skip - _padding(member.size))
    if piece := END_OF_ARCHIVE[skip:]:
        yield piece


def _file_pieces(member: Member, buffer: memoryview, start: int) -> Iterator[memoryview]:
    place = shown_path(member.path)
    with open_regular(member.path, place) as stream:
        try:
            before = os.fstat(stream.fileno())
            if before.st_size != member.size:
                raise _changed(member.path)
            stream.seek(start)
            left = member.size - start
            while left > 0:
                count = stream.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    raise _changed(member.path)
                left -= count
                yield buffer[:count]
            after = os.fstat(stream.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise _changed(member.path)
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({os_reason(error)}).") from None
