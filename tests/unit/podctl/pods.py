"""A pod without a machine: a directory, podctl run on it in this process, and bundles to send there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from components.on_pod.boot import podctl_source
from components.on_pod.podctl import command_line, tars

CONFIG, WEIGHTS = tars.MEMBERS


class Answer(NamedTuple):
    """What podctl did: its exit status, its JSON line ({} where it printed none), and stderr's lines."""

    status: int
    result: dict[str, Any]
    lines: list[str]


class PodDirectory:
    def __init__(self, directory: Path, output: Callable[[], tuple[str, str]]) -> None:
        self.root = directory / "lora-pods"
        self.units = directory / "units"
        self.units.mkdir()
        self._output = output

    def run(self, verb: str, *arguments: str, stdin: bytes | Mapping[str, Any] = b"") -> Answer:
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        argv = ["--root", str(self.root), "--units-dir", str(self.units), verb, *arguments]
        status = command_line.main(argv, io.BytesIO(data))
        out, err = self._output()
        assert out.count("\n") == (1 if status == 0 else 0), out
        return Answer(status, json.loads(out) if out else {}, err.splitlines())

    @cached_property
    def program(self) -> Path:
        """podctl as it comes to a pod, in a file."""
        path = self.root.parent / "podctl.py"
        path.write_text(podctl_source(), encoding="utf-8")
        return path

    def stage(self, tar: bytes) -> str:
        """Puts a tar, whatever it is, where an older podctl left them for `place`. -> its digest"""
        digest = digest_of(tar)
        path = self.staged(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tar)
        return digest

    def staged(self, digest: str, suffix: str = ".tar") -> Path:
        return self.root / "staging" / (digest.removeprefix("sha256:") + suffix)

    def blob(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def unpacked(self, digest: str) -> bytes:
        """The bundle that a blob came from."""
        return bundle((self.blob(digest) / WEIGHTS).read_bytes(), (self.blob(digest) / CONFIG).read_bytes())

    def blobs(self) -> set[str]:
        blobs = self.root / "blobs" / "sha256"
        return {"sha256:" + path.name for path in blobs.iterdir()} if blobs.is_dir() else set()

    def place(self, models: Mapping[str, str], stack: str = "prod", base: str = "org/base") -> Answer:
        return self.run("place", stdin={"stack": stack, "base": base, "models": models, "identity": "pod-1"})

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        """Everything outside staging/: path → (mode, content)."""
        found = {}
        for path in sorted(self.root.parent.rglob("*")):
            if (self.root / "staging") not in (path, *path.parents):
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found[str(path)] = (path.lstat().st_mode, content)
        return found


def digest_of(tar: bytes) -> str:
    return "sha256:" + hashlib.sha256(tar).hexdigest()


def head(*bundles: tuple[str, int, int]) -> bytes:
    """What precedes the bytes that `receive-all` takes: (digest, size, offset) of each bundle."""
    listed = [{"digest": digest, "size": size, "offset": offset} for digest, size, offset in bundles]
    return json.dumps({"bundles": listed}).encode() + b"\n"


def bundle(weights: bytes = b"weights", config: bytes = b"{}") -> bytes:
    """A bundle as the program makes them."""
    return entry(CONFIG, config) + entry(WEIGHTS, weights) + END


END = bytes(1024)


def entry(name: str | bytes, data: bytes = b"", **fields: bytes) -> bytes:
    """One member: header, data, padding. `fields` are written over the header as they are."""
    return header(name, b"%011o\0" % len(data), **fields) + data + bytes(-len(data) % 512)


# Field → (offset, length) in a ustar header.
PLACES = {
    "name": (0, 100), "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12),
    "checksum": (148, 8), "type": (156, 1), "linkname": (157, 100), "magic": (257, 8), "uname": (265, 32),
    "gname": (297, 32), "devmajor": (329, 8), "devminor": (337, 8), "prefix": (345, 155), "rest": (500, 12),
}  # fmt: skip


def header(name: str | bytes, size: bytes, **fields: bytes) -> bytes:
    """A ustar header with a right checksum, unless `fields` give another."""
    values = {
        "name": name.encode() if isinstance(name, str) else name,
        "mode": b"0000644\0", "uid": b"0000000\0", "gid": b"0000000\0", "size": size, "mtime": b"00000000000\0",
        "type": b"0", "magic": b"ustar\x0000", "devmajor": b"0000000\0", "devminor": b"0000000\0", **fields,
    }  # fmt: skip
    raw = bytearray(512)
    for field, value in values.items():
        offset, length = PLACES[field]
        assert len(value) <= length, field
        raw[offset : offset + len(value)] = value
    if "checksum" not in fields:
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def with_tarfile(members: Mapping[str, bytes], form: int, **fields: Any) -> bytes:
    """The tar that Python's writer makes of these, `fields` set on every member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def mode(path: Path) -> str:
    return oct(os.lstat(path).st_mode & 0o7777)
