"""podctl in a process of its own that dies at a chosen step, and what a power cut may leave of what it did.

podctl knows nothing of it: Python's audit events tell of a change to the file system before it is made, and what has no
event (fsync and the like, other programs, bytes that arrive) is wrapped in that process alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from components.on_pod.podctl import command_line, files, names, programs, tars
from components.on_pod.podctl.programs import Ran
from tests.unit.podctl.pods import Answer, PodDirectory

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
PIECE = 700  # bytes that are read at a time


class Step(NamedTuple):
    """What is about to be done: an operation, the paths it is done to, and the bytes that an fsync makes safe."""

    what: str
    paths: tuple[str, ...] = ()
    data: bytes = b""

    def __str__(self) -> str:
        return " ".join([self.what, *self.paths])


class Ended(NamedTuple):
    """`answer` is None where it was killed."""

    answer: Answer | None
    steps: list[Step]


def run(
    pod: PodDirectory,
    *argv: str,
    stdin: bytes | Mapping[str, Any] = b"",
    kill_at: int | None = None,
    others: Callable[..., Ran] | None = None,
) -> Ended:
    """Runs podctl in a child that is killed as by `kill -9` before its step `kill_at`, counted from 0.

    `others` stands in for the programs that it starts, in this process.
    """
    here, there = Pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if fd > 2 and fd != there.fileno():
                    with contextlib.suppress(OSError):
                        os.close(fd)  # the sockets of fake engines: nobody else could listen there
            _live(pod, argv, stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode(), kill_at, there)
        finally:
            os._exit(1)
    there.close()
    steps: list[Step] = []
    answer = None
    while True:
        try:
            kind, value = here.recv()
        except EOFError:
            break
        if kind == "step":
            steps.append(Step(*value))
        elif kind == "run":
            here.send(others(*value) if others else Ran(127, "", f"{value[0]}: not in this test"))
        else:
            answer = Answer(*value)
    _, status = os.waitpid(child, 0)
    if answer is None:
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL
    return Ended(answer, steps)


def _live(pod: PodDirectory, argv: tuple[str, ...], stdin: bytes, kill_at: int | None, parent: Connection) -> None:
    count = 0
    turn = threading.Lock()

    def step(what: str, *paths: str, data: bytes = b"") -> None:
        nonlocal count
        with turn:
            parent.send(("step", (what, paths, data)))
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    class Stream(io.BytesIO):
        def readinto1(self, buffer: Any) -> int:
            step("read")
            return super().readinto1(buffer)

    def told(*argv: str, **_: object) -> Ran:
        step("before " + " ".join(argv))
        parent.send(("run", argv))
        ran: Ran = parent.recv()
        return ran

    files.PIECE = PIECE
    _watch(str(pod.root.parent), step)
    programs.run = told
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    where = ["--root", str(pod.root), "--units-dir", str(pod.units)]
    status = command_line.main([*where, *argv], Stream(stdin))
    step("answer")
    out, said = sys.stdout.getvalue(), sys.stderr.getvalue()
    parent.send(("end", (status, json.loads(out) if out else {}, said.splitlines())))


def _watch(top: str, step: Callable[..., None]) -> None:
    """Tells `step` of everything below `top` that is about to change."""

    def path_of(name: Any, directory: int = -1) -> str:
        if isinstance(name, int):
            return str(Path(f"/proc/self/fd/{name}").readlink())
        parent = Path(f"/proc/self/fd/{directory}").readlink() if directory >= 0 else Path()
        return str(parent / os.fsdecode(name))

    def tell(what: str, *paths: str, data: bytes = b"") -> None:
        if all(path.startswith(top) for path in paths):
            step(what, *paths, data=data)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & WRITING:
            tell("truncate" if arguments[2] & os.O_TRUNC else "create", path_of(arguments[0]))
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            tell(event[3:], path_of(arguments[0], arguments[-1]))
        elif event == "os.rename":
            tell("rename", path_of(arguments[0], arguments[2]), path_of(arguments[1], arguments[3]))
        elif event in ("os.chmod", "os.truncate", "os.utime"):
            tell(event[3:], path_of(arguments[0]))

    def fsync(fd: Any) -> None:
        path = path_of(fd)
        directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        tell("sync", path, data=b"" if directory else Path(path).read_bytes())

    def sync() -> None:
        tell("sync", top)

    def wrapped(name: str, target: int) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            tell(name, path_of(arguments[target]))
            return real(*arguments)

        return call

    os.fsync, os.sync = fsync, sync
    os.pwrite = wrapped("pwrite", 0)
    if hasattr(os, "copy_file_range"):
        os.copy_file_range = wrapped("copy_file_range", 1)
    sys.addaudithook(hook)


# --- power cuts -----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A file's bytes as they are safe, or a directory (`data` is None)."""

    data: bytes | None = None
    entries: dict[str, int] = field(default_factory=dict)


class Change(NamedTuple):
    """Names that come and go together: a rename is one change of two directories, as every file system's journal has
    it. None takes the name away."""

    names: Mapping[tuple[int, str], int | None]


class Disk:
    """What is safe of a directory tree, and what is not yet: a file's bytes until it is fsynced, a name until a
    directory that holds it is."""

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        self.nodes: list[Node] = []
        self.safe: dict[int, dict[str, int]] = {}
        self.pending: list[Change] = []
        self._take(top)

    def _take(self, path: Path) -> int:
        number = len(self.nodes)
        self.nodes.append(Node(None if path.is_dir() else path.read_bytes()))
        if path.is_dir():
            for child in sorted(path.iterdir()):
                self.nodes[number].entries[child.name] = self._take(child)
            self.safe[number] = dict(self.nodes[number].entries)
        return number

    def _find(self, path: str) -> int | None:
        number = 0
        for name in Path(path).relative_to(self.top).parts:
            found = self.nodes[number].entries.get(name)
            if found is None:
                return None
            number = found
        return number

    def _change(self, *names: tuple[str, int | None]) -> None:
        placed: dict[tuple[int, str], int | None] = {}
        for path, number in names:
            parent = self._find(str(Path(path).parent))
            assert parent is not None, path
            entries, name = self.nodes[parent].entries, Path(path).name
            if number is None:
                entries.pop(name, None)
            else:
                entries[name] = number
            placed[(parent, name)] = number
        self.pending.append(Change(placed))

    def do(self, step: Step) -> None:
        """Takes a step that podctl took; one that failed changes nothing."""
        if step.what in ("create", "truncate", "mkdir"):
            number = self._find(step.paths[0])
            if number is None:
                self.nodes.append(Node(None if step.what == "mkdir" else b""))
                number = len(self.nodes) - 1
                if step.what == "mkdir":
                    self.safe[number] = {}
                self._change((step.paths[0], number))
            elif step.what == "truncate":
                self.nodes[number].data = b""
        elif step.what in ("remove", "rmdir"):
            number = self._find(step.paths[0])
            if number is not None and not self.nodes[number].entries:
                self._change((step.paths[0], None))
        elif step.what == "rename":
            number = self._find(step.paths[0])
            if number is not None:
                self._change((step.paths[0], None), (step.paths[1], number))
        elif step.what == "sync":
            number = self._find(step.paths[0])
            assert number is not None, step
            if number == 0:
                for change in self.pending:
                    _apply(self.safe, change)
                self.pending = []
            elif self.nodes[number].data is not None:
                self.nodes[number].data = step.data
            else:
                touching = [change for change in self.pending if any(parent == number for parent, _ in change.names)]
                for change in touching:
                    _apply(self.safe, change)
                self.pending = [change for change in self.pending if change not in touching]

    def after_a_cut(self) -> Iterator[dict[str, bytes | None]]:
        """What may be there when the power is back: each change that is not safe yet may be lost or not."""
        count = len(self.pending)
        few = range(count + 1) if count <= 3 else (0, 1, count)
        for kept in few:
            for chosen in combinations(self.pending, kept):
                entries = {number: dict(names) for number, names in self.safe.items()}
                for change in chosen:
                    _apply(entries, change)
                tree: dict[str, bytes | None] = {}
                self._list(0, "", entries, tree)
                yield tree

    def _list(
        self, number: int, path: str, entries: Mapping[int, Mapping[str, int]], tree: dict[str, bytes | None]
    ) -> None:
        for name, child in sorted(entries[number].items()):
            tree[path + name] = self.nodes[child].data
            if self.nodes[child].data is None:
                self._list(child, f"{path}{name}/", entries, tree)


def _apply(entries: dict[int, dict[str, int]], change: Change) -> None:
    for (parent, name), number in change.names.items():
        if number is None:
            entries[parent].pop(name, None)
        else:
            entries[parent][name] = number


def write_tree(top: Path, tree: Mapping[str, bytes | None]) -> None:
    """Makes `top` hold this and nothing else."""
    clear(top)
    for name, data in tree.items():
        if data is None:
            (top / name).mkdir()
        else:
            (top / name).write_bytes(data)
    for path in top.glob("lora-pods/blobs/sha256/*"):
        path.chmod(0o555)


def clear(top: Path) -> None:
    for path in sorted(top.iterdir()):
        if path.is_dir():
            files.remove_tree(str(path))
        else:
            path.unlink()


# --- what must hold at any moment -----------------------------------------------------------------------------------


def wrong(pod: PodDirectory, modes: bool = True) -> list[str]:
    """What a reader could trip over: a half blob, a half unit, a reference to nothing."""
    found = []
    blobs = set()
    for path in sorted(pod.root.glob("blobs/sha256/*")):
        blobs.add(path.name)
        if not all((path / name).is_file() for name in tars.MEMBERS) or tars.hash_blob(str(path)) != path.name:
            found.append(f"a half blob: {path.name[:8]}")
        elif modes and path.stat().st_mode & 0o555 != 0o555:
            found.append(f"a blob that no engine may read: {path.name[:8]}")

    def named_in(text: str, where: str) -> None:
        absent = set(names.BLOB_PATH.findall(text)) - blobs
        found.extend(f"{where} names a blob that is not there: {name[:8]}" for name in sorted(absent))

    for path in sorted(pod.root.glob("refs/[!.]*/[!.]*")):
        try:
            name = json.loads(path.read_bytes())["digest"].removeprefix("sha256:")
        except ValueError:
            found.append(f"a half reference: {path.name}")
        else:
            named_in(f"blobs/sha256/{name}", f"the reference {path.name}")
    for path in sorted(pod.units.glob("lora-pods-*.service")):
        text = path.read_text()
        if not (text.startswith("# fake:") and text.endswith("\n") and "ExecStart=" in text):
            found.append(f"half a unit: {path.name}")
        named_in(text, path.name)
    for path in sorted(pod.root.glob("units/[!.]*/[0-9]*")):
        if not (path / "proven").exists():
            continue
        if not ((path / "unit").is_file() and (path / "doc.json").is_file()):
            found.append(f"generation {path.name} is proven and not whole")
            continue
        document = json.loads((path / "doc.json").read_bytes())
        named_in((path / "unit").read_text(), f"generation {path.name}")
        secrets = pod.root / "secrets" / f"{document['engine']}.{document['secretsRevision']}.env"
        if document["secretsRevision"] and not secrets.exists():
            found.append(f"generation {path.name} has lost its secrets")
    for path in sorted(pod.root.glob("secrets/[!.]*.env")):
        if not re.fullmatch(r'# revision \d+\n(?:\w+="[^"]*"\n)*', path.read_text()):
            found.append(f"half a file of secrets: {path.name}")
    for path in sorted(pod.root.glob("bin/podctl-*.py")):
        if not path.read_text().endswith("# the end\n"):
            found.append(f"half a program: {path.name}")
    return found


def settled(pod: PodDirectory, hidden: bool = True) -> dict[str, bytes]:
    """Everything that matters once a run has ended: path → content, generations numbered by their order."""
    tree = {}
    for path in sorted(pod.root.parent.rglob("*")):
        name = str(path.relative_to(pod.root.parent))
        if not (name.startswith(("lora-pods/staging", "lora-pods/.lock")) or (not hidden and "/." in name)):
            tree[name] = path.read_bytes() if path.is_file() else b""
    for engine in pod.root.glob("units/*"):
        numbers = sorted(int(path.name) for path in engine.iterdir() if path.name.isdigit())
        for order, number in enumerate(numbers):
            before = f"lora-pods/units/{engine.name}/{number}"
            tree = {
                name.replace(before, f"lora-pods/units/{engine.name}/#{order}")
                if name == before or name.startswith(before + "/")
                else name: content
                for name, content in tree.items()
            }
    return tree
