"""A bundle that is taken apart as it comes: cut and resumed anywhere, its weights written once."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import files, part, receiving, tars
from components.on_pod.podctl.said import Refusal
from components.on_pod.podctl.store import Store
from tests.unit.podctl.pods import (
    CONFIG,
    END,
    WEIGHTS,
    PodDirectory,
    bundle,
    digest_of,
    entry,
    head,
    header,
    with_tarfile,
)  # fmt: skip
from tests.unit.podctl.test_podctl_receive import missing

BYTES = os.urandom(3_000_001)
TAR = bundle(BYTES, b'{"r": 8}')
DIGEST, SIZE = digest_of(TAR), len(TAR)
START = 1536  # of the weights
END_OF_WEIGHTS = START + len(BYTES)
PART = f".part/{WEIGHTS}"  # where they are while they come


def sent(pod: PodDirectory, tar: bytes, offset: int = 0, until: int | None = None) -> list[str]:
    """Sends a bundle from `offset` on, as if the connection ended at `until`. -> what is said"""
    stdin = head((digest_of(tar), len(tar), offset)) + tar[offset:until]
    return pod.run("receive-all", stdin=stdin).lines


def staged(pod: PodDirectory) -> dict[str, bytes]:
    """What is kept of bundles: the name of each file, without the digest, and its bytes."""
    kept = [path for path in (pod.root / "staging").rglob("*") if path.is_file() and path.suffix != ".claim"]
    return {str(path.relative_to(pod.root / "staging"))[64:]: path.read_bytes() for path in kept}


CUTS = [
    *(1, 511, 512, 513, 520, 1023, 1024, 1535, START, START + 1, 1_048_575, 1_048_576, 1_048_577, 2_000_003),
    *(END_OF_WEIGHTS - 1, END_OF_WEIGHTS, END_OF_WEIGHTS + 1, SIZE - 1024, SIZE - 1),
]


@pytest.mark.parametrize("cut", CUTS)
def test_a_bundle_may_be_cut_anywhere(cut: int, pod: PodDirectory) -> None:
    assert sent(pod, TAR, until=cut) == [
        f"the connection ended after {cut} of {SIZE} bytes of {DIGEST}: they are kept, run this again"
    ]
    here = missing(pod, {DIGEST: SIZE})[DIGEST]
    assert here == (cut if cut < END_OF_WEIGHTS else SIZE), "behind the weights are zeros, which need not come"
    expected = {".tar.part": TAR[:START], PART: TAR[START : min(cut, END_OF_WEIGHTS)]}
    assert staged(pod) == (expected if cut >= START else {".tar.part": TAR[:cut]})

    assert sent(pod, TAR, offset=here) == [f"{DIGEST} is here (2.9 MiB)"]
    assert (pod.unpacked(DIGEST), staged(pod)) == (TAR, {})


def test_cut_again_and_again_in_small_pieces(pod: PodDirectory) -> None:
    tar = bundle(BYTES[:3000])
    digest, size = digest_of(tar), len(tar)
    here = 0
    while here < size:
        here = missing(pod, {digest: size})[digest]
        sent(pod, tar, offset=here, until=here + 97)
    assert pod.unpacked(digest) == tar


def test_a_sender_may_begin_before_what_is_kept(pod: PodDirectory) -> None:
    for begin in (2_000_000, START, START - 1, 10, 0):
        sent(pod, TAR, until=2_500_000)
        assert sent(pod, TAR, offset=begin) == [f"{DIGEST} is here (2.9 MiB)"]
        assert pod.unpacked(DIGEST) == TAR
        pod.blob(DIGEST).rename(pod.root / f"taken-{begin}")


def test_an_offset_past_what_is_kept_changes_nothing(pod: PodDirectory) -> None:
    sent(pod, TAR, until=2_000_000)
    before = staged(pod)
    assert sent(pod, TAR, offset=2_000_001) == [
        f"{DIGEST} has fewer than 2000001 bytes here: ask again what is missing"
    ]
    assert staged(pod) == before

    other = bundle(b"other")
    assert sent(pod, other, offset=1) == [f"{digest_of(other)} has fewer than 1 bytes here: ask again what is missing"]
    assert not pod.staged(digest_of(other), ".tar.part").exists(), "nor is anything made"


def test_weights_are_written_once(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = tars.copy_range

    def counted(source: int, offset: int, target: int, size: int) -> None:
        copied.append(size)
        real(source, offset, target, size)

    monkeypatch.setattr(tars, "copy_range", counted)

    sent(pod, TAR)

    assert pod.unpacked(DIGEST) == TAR
    assert copied == [len(b'{"r": 8}')]


@pytest.mark.parametrize(
    "tar",
    [
        entry(WEIGHTS, BYTES) + entry(CONFIG, b"{}") + END,
        with_tarfile({CONFIG: b"{}", WEIGHTS: BYTES}, tarfile.GNU_FORMAT, uname="alice"),
        entry(CONFIG, b"{}") + entry(WEIGHTS, BYTES) + END + bytes(512),
    ],
    ids=["another order", "another writer", "more zeros at the end"],
)
def test_a_tar_in_another_form_is_refused(tar: bytes, pod: PodDirectory) -> None:
    """Its blob would hash as another: a refresh would call it rotten, and each `up` send it again."""
    digest = digest_of(tar)
    sent(pod, tar, until=len(tar) - 1)
    assert staged(pod) == {".tar.part": tar[:-1]}

    refusal = f"{digest} is refused and removed: it is written otherwise than lora-pods writes a bundle; "
    assert [line[: len(refusal)] for line in sent(pod, tar, offset=len(tar) - 1)] == [refusal]
    assert (pod.blobs(), staged(pod)) == (set(), {})


def test_a_tar_with_a_long_head_stays_a_tar(pod: PodDirectory) -> None:
    tar = bundle(BYTES, b"{" + b" " * part.HEAD_MOST + b"}")
    digest = digest_of(tar)
    sent(pod, tar, until=len(tar) - 1)
    assert staged(pod) == {".tar.part": tar[:-1]}
    assert missing(pod, {digest: len(tar)}) == {digest: len(tar) - 1}

    sent(pod, tar, offset=len(tar) - 1)

    assert (pod.unpacked(digest), staged(pod)) == (tar, {})


def test_what_comes_behind_the_weights_is_looked_at(pod: PodDirectory) -> None:
    """No byte of a bundle is left out of its blob unseen, also where its digest is right."""
    for tar in (TAR[:-1] + b"!", TAR[:END_OF_WEIGHTS] + b"!" + TAR[END_OF_WEIGHTS + 1 :], bundle()[:-1] + b"!"):
        refusal = f"{digest_of(tar)} is refused and removed: the tar goes on after the end of its weights"
        assert sent(pod, tar) == [refusal]
        assert (pod.blobs(), staged(pod)) == (set(), {})


def test_a_part_that_rotted_is_found_by_the_digest_and_sent_anew(pod: PodDirectory) -> None:
    sent(pod, TAR, until=2_000_000)
    with pod.staged(DIGEST, PART).open("r+b") as weights:
        weights.seek(1000)
        weights.write(b"rot")

    (said,) = sent(pod, TAR, offset=2_000_000)

    assert said.startswith(f"the {SIZE} bytes that arrived as {DIGEST} have the digest sha256:")
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 0}


@pytest.mark.parametrize("left", [b"", TAR[:600], b"x" * START])
def test_weights_without_their_head_are_forgotten(left: bytes, pod: PodDirectory) -> None:
    """A power cut may have taken it."""
    sent(pod, TAR, until=2_000_000)
    pod.staged(DIGEST, ".tar.part").write_bytes(left)
    here = missing(pod, {DIGEST: SIZE})[DIGEST]
    assert here == len(left)
    said = sent(pod, TAR, offset=here)
    if said[0].startswith("the "):  # what is no head is found by the digest
        said = sent(pod, TAR, offset=missing(pod, {DIGEST: SIZE})[DIGEST])
    assert said == [f"{DIGEST} is here (2.9 MiB)"]
    assert pod.unpacked(DIGEST) == TAR


def test_killed_while_it_was_taken_apart(pod: PodDirectory) -> None:
    missing(pod, {DIGEST: SIZE})
    pod.staged(DIGEST, ".tar.part").write_bytes(TAR[:9000])
    pod.staged(DIGEST, ".part").mkdir()
    pod.staged(DIGEST, PART).write_bytes(TAR[START:5000])
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 9000}
    sent(pod, TAR, offset=9000)
    assert pod.unpacked(DIGEST) == TAR


@pytest.mark.parametrize("here", [START, 1_500_000, part.KILLED_WITH])
def test_killed_before_it_was_taken_apart(here: int, pod: PodDirectory) -> None:
    missing(pod, {DIGEST: SIZE})
    pod.staged(DIGEST, ".tar.part").write_bytes(TAR[:here])
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: here}
    sent(pod, TAR, offset=here, until=here)
    assert staged(pod) == {".tar.part": TAR[:START], PART: TAR[START:here]}
    sent(pod, TAR, offset=here)
    assert (pod.unpacked(DIGEST), staged(pod)) == (TAR, {})


def test_a_part_of_an_older_podctl_goes_on_as_a_tar(pod: PodDirectory) -> None:
    missing(pod, {DIGEST: SIZE})
    pod.staged(DIGEST, ".tar.part").write_bytes(TAR[:2_500_000])
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 2_500_000}
    sent(pod, TAR, offset=2_500_000, until=2_500_001)
    assert staged(pod) == {".tar.part": TAR[:2_500_001]}
    sent(pod, TAR, offset=2_500_001)
    assert (pod.unpacked(DIGEST), staged(pod)) == (TAR, {})


def test_killed_as_it_became_a_blob(pod: PodDirectory) -> None:
    sent(pod, TAR, until=SIZE - 1)
    (pod.staged(DIGEST, ".part") / CONFIG).write_bytes(b"{")
    pod.staged(DIGEST, PART).chmod(0o444)
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: SIZE}
    sent(pod, TAR, offset=SIZE)
    assert (pod.unpacked(DIGEST), staged(pod)) == (TAR, {})


def test_what_goes_on_is_not_abandoned_and_what_does_not_is(pod: PodDirectory) -> None:
    def a_week_passes() -> None:
        for path in (pod.root / "staging").iterdir():
            os.utime(path, (time.time() - 8 * 86400,) * 2)

    sent(pod, TAR, until=2_000_000)
    a_week_passes()
    sent(pod, TAR, offset=2_000_000, until=2_000_001)
    pod.run("gc")
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 2_000_001}

    a_week_passes()
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 2_000_001}
    pod.run("gc")
    assert sent(pod, TAR, offset=2_000_001, until=2_000_002)[0].startswith("the connection ended"), "it was promised"

    a_week_passes()
    with files.hold(str(pod.staged(DIGEST, ".lock")), "receive"):  # by a pod whose clock was set
        a_week_passes()
        pod.run("gc")
        assert pod.staged(DIGEST, ".lock").exists()
        assert staged(pod)[PART] == TAR[START:2_000_002]
    pod.run("gc")
    assert list((pod.root / "staging").iterdir()) == []


def test_a_sender_that_falls_silent_is_not_waited_for(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that sleeps may leave a connection that never ends, and with it the bundle's lock."""
    monkeypatch.setattr(receiving, "STALL_SECONDS", 0.1)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stdin, os.fdopen(writer, "wb") as sender:
        sender.write(TAR[:5000])
        sender.flush()
        store = Store(str(pod.root), str(pod.units))
        store.make_staging()
        incoming = receiving.Incoming(stdin)
        digest = DIGEST.removeprefix("sha256:")
        with incoming.attended():
            with pytest.raises(Refusal) as refusal:
                receiving.take(store, incoming, digest, SIZE, 0)
            with pytest.raises(Refusal, match="nothing came for 0 seconds: run this again"):
                incoming.skip(1)
    assert str(refusal.value) == (
        f"nothing came for 0 seconds after 5000 of {SIZE} bytes of {DIGEST}: they are kept, run this again"
    )
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 5000}


def test_a_sender_that_is_slow_is_waited_for(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its bytes take: what counts is that some come."""
    monkeypatch.setattr(receiving, "STALL_SECONDS", 0.1)
    looks: list[int] = []
    tar = bundle(b"slow")

    class Slow(io.BytesIO):
        def readinto1(self, view: Any) -> int:
            due = len(looks) + 1
            while len(looks) < due:
                time.sleep(0.001)  # until the timer has looked once more
            return super().readinto1(view[:1000])

    incoming = receiving.Incoming(Slow(tar))
    real = incoming.look

    def look(*_: object) -> None:
        looks.append(1)
        real()

    monkeypatch.setattr(incoming, "look", look)
    store = Store(str(pod.root), str(pod.units))
    store.make_staging()
    with incoming.attended():
        assert receiving.take(store, incoming, digest_of(tar).removeprefix("sha256:"), len(tar), 0) == len(tar)
    assert len(looks) >= 4


def test_large_weights_go_to_the_disk_as_they_come_their_head_before_them(
    pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it they would be nobody's after a power cut: also where an earlier run was killed and synced nothing."""
    tar = bundle(bytes(20 * 2**20))
    digest = digest_of(tar)
    sent(pod, tar, until=5000)
    done: list[tuple[str, int]] = []
    fsync, advise = os.fsync, os.posix_fadvise

    def synced(fd: int) -> None:
        done.append((Path(f"/proc/self/fd/{fd}").readlink().name[-9:], 0))
        fsync(fd)

    def advised(fd: int, start: int, length: int, advice: int) -> None:
        done.append((Path(f"/proc/self/fd/{fd}").readlink().name, start))
        advise(fd, start, length, advice)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    assert sent(pod, tar, offset=5000) == [f"{digest} is here (20.0 MiB)"]
    assert pod.unpacked(digest) == tar
    starts = [start for name, start in done if name == WEIGHTS]
    assert done[:2] == [(".tar.part", 0), (WEIGHTS, 0)]
    assert [start // part.TO_DISK for start in starts] == [0, 1]


def test_a_slow_hash_sees_the_bytes_that_came(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on a thread of its own, on buffers that are used again."""
    tar = bundle(os.urandom(12 * 2**20))

    class Slow:
        def __init__(self) -> None:
            self.real = hashlib.sha256()

        def update(self, piece: bytes) -> None:
            time.sleep(0.005)
            self.real.update(piece)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    store = Store(str(pod.root), str(pod.units))
    store.make_staging()
    with part.opened(store, digest_of(tar).removeprefix("sha256:"), len(tar)) as arriving:
        arriving.begin(0)
        monkeypatch.setattr(arriving.digest, "sha256", Slow())
        receiving.pump(io.BytesIO(tar), arriving, len(tar))
        assert arriving.is_right()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513])
def test_the_shape_of_a_bundle(size: int) -> None:
    tar = bundle(BYTES[:700], b"x" * size)
    start = 1024 + -(-size // 512) * 512
    assert tars.shape_of(tar) == tars.shape_of(tar[:start]) == tars.Shape(size, start, 700)
    assert tars.Shape(size, start, 700).size == len(tar)
    assert tars.shape_of(tar[: start - 1]) is None


def test_only_a_head_in_the_programs_own_form_has_a_shape() -> None:
    tar = bundle(BYTES[:700], b"{}")[:START]
    free = range(512, 514)  # the configuration's own bytes
    for position in sorted(set(range(START)) - set(free)):
        other = bytearray(tar)
        other[position] ^= 1
        assert tars.shape_of(bytes(other)) is None, position
    for size in (b"-0000000001\0", b"\x80" + bytes(10) + b"\x07", b"\0" * 12, b"7 000000001\0"):
        assert tars.shape_of(header(CONFIG, size) + tar[512:]) is None
        assert tars.shape_of(tar[:1024] + header(WEIGHTS, size)) is None


@pytest.mark.parametrize("until", [2_000_000, None], ids=["cut", "whole"])
def test_what_did_not_get_to_the_disk_is_sent_again(
    until: int | None, pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of bytes that it lost once: the next fsync succeeds, and they are in the cache alone."""

    def lost(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name == WEIGHTS:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lost)
        assert sent(pod, TAR, until=until) == ["podctl receive-all failed: this pod: Input/output error"]
    assert (pod.blobs(), staged(pod)) == (set(), {})
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 0}
