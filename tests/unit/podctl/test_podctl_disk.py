"""A disk that is full, read-only or out of inodes, made of tmpfs: told before bytes travel where it can be known, else
nothing is left there, and what serves serves on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import files, programs, receiving, waiting
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_s3 import S3
from tests.unit.podctl.fake_systemd import FakeSystemd
from tests.unit.podctl.pods import WEIGHTS, PodDirectory, bundle, digest_of, head

MIB = 1024 * 1024
BIG = bundle(b"w" * (2 * MIB))
DIGEST = digest_of(BIG)
AGAIN = "run pulumi up again"


class Disk:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int) -> None:
        """Somebody else's file takes all but so many bytes."""
        disk = os.statvfs(self.path)
        (self.path / "theirs").write_bytes(bytes(disk.f_bavail * disk.f_frsize - leave))

    def use_inodes(self, leave: int) -> None:
        for number in range(os.statvfs(self.path).f_favail - leave):
            (self.path / f"theirs-{number}").touch()

    def make_room(self) -> None:
        for path in self.path.glob("theirs*"):
            path.unlink()

    def read_only(self, yes: bool) -> None:
        subprocess.run(["mount", "-o", "remount," + ("ro" if yes else "rw"), str(self.path)], check=True)

    @property
    def free(self) -> tuple[int, int]:
        disk = os.statvfs(self.path)
        return disk.f_bavail, disk.f_favail


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    options = "size=8m,nr_inodes=400"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def pod(
    disk: Disk, pod: PodDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> PodDirectory:
    monkeypatch.setattr(receiving, "SPARE_BYTES", 0)
    return PodDirectory(disk.path, lambda: capsys.readouterr()[:2])


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    server = S3({DIGEST: BIG})
    yield server
    server.close()


def missing(pod: PodDirectory) -> list[str]:
    return pod.run("missing", stdin={"bundles": {DIGEST: len(BIG)}}).lines


def ways(s3: S3, offset: int = 0) -> list[tuple[str, bytes | Mapping[str, Any]]]:
    """How the bundle may come."""
    stream = head((DIGEST, len(BIG), offset)) + BIG[offset:]
    return [("receive-all", stream), ("fetch", {"bundles": [s3.bundle(DIGEST)]})]


def full(pod: PodDirectory) -> list[str]:
    return [f"the disk of {pod.root} is full: make room there, or use a larger disk, and {AGAIN}"]


def test_too_small_a_disk_is_refused_before_bytes_travel(pod: PodDirectory, disk: Disk, s3: S3) -> None:
    assert missing(pod) == []
    disk.fill(leave=MIB)
    said = [
        f"the disk of {pod.root} has 1.0 MiB free and the bundles need 2.0 MiB, and 0 bytes must stay free: make room "
        "there, or use a larger disk"
    ]
    assert missing(pod) == said
    assert pod.run("receive-all", stdin=head((DIGEST, len(BIG), 0))).lines == said
    assert pod.run("fetch", stdin={"bundles": [s3.bundle(DIGEST)]}).lines == said
    assert s3.asked == []
    promised = {path.name for path in (pod.root / "staging").iterdir()}
    assert promised == {DIGEST.removeprefix("sha256:") + ".claim"}, "and nothing else is left"

    disk.make_room()
    pod.stage(BIG)
    disk.fill(leave=3 * MIB)
    assert missing(pod) == [], "what has arrived needs no more than to be unpacked"
    disk.make_room()
    disk.fill(leave=2 * MIB)
    assert len(missing(pod)) == 1, "and no less"
    pod.staged(DIGEST).unlink()

    disk.make_room()
    pod.staged(DIGEST, ".tar.part").write_bytes(BIG[:-1])  # too far to be taken apart
    disk.fill(leave=MIB)
    for verb, stdin in ways(s3, offset=len(BIG) - 1):
        assert pod.run(verb, stdin=stdin).lines == said, "a part that stays a tar does too"


def test_what_is_of_no_use_gives_its_room(pod: PodDirectory, disk: Disk, s3: S3) -> None:
    """Weights whose head was lost in a power cut go when the bundle comes."""
    for verb, stdin in ways(s3):
        assert missing(pod) == []
        pod.staged(DIGEST, ".part").mkdir()
        pod.staged(DIGEST, f".part/{WEIGHTS}").write_bytes(b"w" * (2 * MIB - 1))
        disk.fill(leave=MIB)
        assert missing(pod) == []
        assert pod.run(verb, stdin=stdin).status == 0
        assert pod.unpacked(DIGEST) == BIG
        files.remove_tree(str(pod.blob(DIGEST)))
        disk.make_room()


def test_inodes_are_counted_too(pod: PodDirectory, disk: Disk) -> None:
    pod.run("gc")
    missing(pod)
    disk.use_inodes(leave=90)
    assert missing(pod) == [f"the disk of {pod.root} has 90 inodes free and the bundles need 110: remove files there"]


def test_a_disk_that_fills_up_meanwhile_is_given_back(
    pod: PodDirectory, disk: Disk, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "check_room", lambda *_: 0)
    missing(pod)
    disk.fill(leave=MIB)
    before = disk.free
    for verb, stdin in ways(s3):
        answer = pod.run(verb, stdin=stdin)
        assert (answer.status, answer.lines) == (1, full(pod))
        assert disk.free == before

    disk.make_room()
    disk.fill(leave=3 * MIB)
    assert pod.run("receive-all", stdin=head((DIGEST, len(BIG), 0)) + BIG).status == 0, "its weights are written once"
    assert pod.unpacked(DIGEST) == BIG
    files.remove_tree(str(pod.blob(DIGEST)))
    before = disk.free

    pod.stage(BIG)  # and of one that is a tar there must be room for its files beside it
    answer = pod.place({"m": DIGEST})
    assert (answer.status, answer.lines) == (1, full(pod))
    pod.staged(DIGEST).unlink()
    assert (pod.blobs(), disk.free) == (set(), before)
    pod.stage(BIG)
    assert not (pod.root / "refs").exists()

    disk.make_room()
    assert pod.place({"m": DIGEST}).result["unpacked"] == [DIGEST]


def test_no_inode_left_is_no_full_disk(pod: PodDirectory, disk: Disk) -> None:
    missing(pod)
    pod.stage(BIG)
    disk.use_inodes(leave=2)
    answer = pod.place({"m": DIGEST})
    assert answer.lines == [f"the disk of {pod.root} has 2 inodes left: remove files there, and {AGAIN}"]
    assert disk.free[1] == 2

    disk.make_room()
    assert pod.place({"m": DIGEST}).status == 0


def test_a_read_only_disk_is_refused_before_bytes_travel(pod: PodDirectory, disk: Disk) -> None:
    missing(pod)
    disk.read_only(True)
    (line,) = missing(pod)
    assert line == (f"the disk of {pod.root}/.lock is read-only: find out why (dmesg), make it writable, and {AGAIN}")
    needs = {"diskGiB": 0.0, "shmMiB": 0, "gpu": False, "python": None, "vllm": None, "base": None}
    prepared = pod.run("prepare", stdin={"podctl": "", "sha256": "", "needs": needs})
    assert f"- the disk of {pod.root} is read-only: find out why (dmesg), and make it writable" in prepared.lines
    disk.read_only(False)
    assert missing(pod) == []


def test_a_full_disk_can_be_emptied_of_what_nobody_needs(pod: PodDirectory, disk: Disk) -> None:
    pod.stage(BIG)
    pod.place({"m": DIGEST})
    disk.fill(leave=0)
    assert disk.free[0] == 0
    assert pod.run("unplace", "--stack", "prod", "--base", "org/base") == (
        0, {"dropped": ["m"], "collected": [DIGEST]}, [],
    )  # fmt: skip
    assert disk.free[0] > 0


def test_drift_is_told_of_a_disk_that_takes_no_mark(
    pod: PodDirectory, disk: Disk, port: int, systemd: FakeSystemd
) -> None:
    engine = Engine(pod, port)
    assert engine.activate().status == 0
    path = pod.blob(engine.digest) / WEIGHTS
    path.chmod(0o644)
    path.write_bytes(b"weightz")
    disk.read_only(True)
    answer = pod.run("intact", "--engine", ENGINE)
    disk.read_only(False)
    assert answer == (0, {"drift": {"blob of m1": f"{engine.digest} was altered"}}, [])


@pytest.mark.parametrize("kind", ["full", "read-only", "inodes"])
def test_an_engine_serves_on(
    kind: str, pod: PodDirectory, disk: Disk, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    systemd = FakeSystemd(pod.units)
    monkeypatch.setattr(programs, "run", systemd.run)

    def secrets(key: str) -> int:
        answer = pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": key}})
        return int(answer.result["revision"])

    try:
        engine = Engine(pod, port)
        assert engine.activate(revision=secrets("old"), key="old").status == 0
        revision = secrets("new")
        before, starts = pod.snapshot(), systemd.units[UNIT].starts
        if kind == "full":
            disk.fill(leave=0)
        elif kind == "inodes":
            disk.use_inodes(leave=3)
        else:
            disk.read_only(True)

        answer = engine.activate("m1", "m2", revision=revision, key="new")

        assert answer.status == 1
        assert len(answer.lines) == 1
        assert answer.lines[0].startswith("the disk of ")
        if kind == "read-only":
            disk.read_only(False)
        disk.make_room()
        assert pod.snapshot() == before
        assert systemd.units[UNIT].starts == starts
        assert engine.activate("m1", "m2", revision=revision, key="new").result["restarted"] is True
    finally:
        systemd.close()
