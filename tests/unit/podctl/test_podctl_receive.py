"""Bundles on their way: resumed, verified, and never a blob before they are whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import files, names
from components.on_pod.podctl.said import Refusal
from components.on_pod.podctl.store import Store
from tests.unit.podctl.pods import WEIGHTS, Answer, PodDirectory, bundle, digest_of, entry, head

TAR = bundle(b"w" * 3_000_000)
DIGEST = digest_of(TAR)
SIZE = len(TAR)
OTHER = bundle(b"other")
OTHER_DIGEST = digest_of(OTHER)


def missing(pod: PodDirectory, bundles: dict[str, int]) -> dict[str, int]:
    result: dict[str, int] = pod.run("missing", stdin={"bundles": bundles}).result["missing"]
    return result


def send(pod: PodDirectory, sent: bytes, offset: int = 0) -> Answer:
    """Sends these bytes as those of the bundle after `offset`."""
    return pod.run("receive-all", stdin=head((DIGEST, SIZE, offset)) + sent)


def cut(at: int) -> list[str]:
    return [f"the connection ended after {at} of {SIZE} bytes of {DIGEST}: they are kept, run this again"]


def test_what_has_another_digest_is_thrown_away(pod: PodDirectory) -> None:
    other = bundle(b"o" * 3_000_000)

    answer = send(pod, other)

    said = f"the {SIZE} bytes that arrived as {DIGEST} have the digest {digest_of(other)}: they are thrown away, "
    assert answer == (1, {}, [said + "run this again"])
    assert list((pod.root / "staging").iterdir()) == []


def test_a_short_stream_is_kept_and_resumed(pod: PodDirectory) -> None:
    assert send(pod, TAR[:1_500_001]) == (1, {}, cut(1_500_001))
    assert pod.blobs() == set()
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 1_500_001}

    rest = send(pod, TAR[1_500_001:], offset=1_500_001)

    assert rest.result == {"received": {DIGEST: SIZE - 1_500_001}}
    assert pod.unpacked(DIGEST) == TAR


def test_what_was_kept_past_the_bundles_end_is_cut_off(pod: PodDirectory) -> None:
    send(pod, TAR[:100])
    pod.staged(DIGEST, ".tar.part").write_bytes(TAR + b"more")

    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 0}
    assert send(pod, TAR[100:], offset=100).status == 0
    assert pod.unpacked(DIGEST) == TAR


def test_an_offset_past_the_kept_end_is_refused(pod: PodDirectory) -> None:
    send(pod, TAR[:100])

    answer = send(pod, TAR[200:], offset=200)

    assert answer == (1, {}, [f"{DIGEST} has fewer than 200 bytes here: ask again what is missing"])
    assert pod.staged(DIGEST, ".tar.part").read_bytes() == TAR[:100]


def test_a_damaged_part_is_found_by_the_digest_and_sent_anew(pod: PodDirectory) -> None:
    send(pod, TAR[:1000])
    pod.staged(DIGEST, ".tar.part").write_bytes(b"x" * 1000)

    assert send(pod, TAR[1000:], offset=1000).status == 1
    assert missing(pod, {DIGEST: SIZE}) == {DIGEST: 0}


def test_a_bundle_that_is_unpacked_already_is_not_received(pod: PodDirectory) -> None:
    pod.stage(TAR)
    pod.place({"m": DIGEST})

    assert send(pod, TAR) == (0, {"received": {DIGEST: 0}}, [f"{DIGEST} is here (2.9 MiB)"])


def test_receive_all_takes_bundles_one_after_the_other_and_unpacks_them(pod: PodDirectory) -> None:
    send(pod, TAR[:1000])

    answer = pod.run(
        "receive-all",
        stdin=head((OTHER_DIGEST, len(OTHER), 0), (DIGEST, SIZE, 1000)) + OTHER + TAR[1000:],
    )

    assert answer == (
        0,
        {"received": {OTHER_DIGEST: len(OTHER), DIGEST: SIZE - 1000}},
        [f"{OTHER_DIGEST} is here (3.0 KiB)", f"{DIGEST} is here (2.9 MiB)"],
    )
    assert (pod.unpacked(OTHER_DIGEST), pod.unpacked(DIGEST)) == (OTHER, TAR)
    assert list((pod.root / "staging").iterdir()) == []
    assert missing(pod, {DIGEST: SIZE, OTHER_DIGEST: len(OTHER)}) == {}


def test_what_arrived_is_kept_until_it_is_placed(pod: PodDirectory) -> None:
    """Somebody else's clean-up may come in between."""
    pod.run("missing", stdin={"engine": names.engine_of("prod", "org/base"), "bundles": {DIGEST: SIZE}})
    pod.run("receive-all", stdin=head((DIGEST, SIZE, 0)) + TAR)

    assert pod.run("gc").result == {"collected": []}
    assert pod.place({"m": DIGEST}).status == 0
    pod.run("unplace", "--stack", "prod", "--base", "org/base")
    assert pod.blobs() == set()


def test_a_bundle_that_is_refused_is_told_beside_a_connection_that_ended(pod: PodDirectory) -> None:
    bad = entry("adapter_config.json", b"{}") + bytes(1024)
    digest = digest_of(bad)
    answer = pod.run("receive-all", stdin=head((digest, len(bad), 0), (DIGEST, SIZE, 0)) + bad + TAR[:1000])
    assert answer.lines == [
        f'{digest} is refused and removed: the tar has no "adapter_model.safetensors"',
        f"the connection ended after 1000 of {SIZE} bytes of {DIGEST}: they are kept, run this again",
    ]


def test_a_bundle_is_unpacked_while_the_next_one_arrives(pod: PodDirectory) -> None:
    process = podctl_process(pod, "receive-all")
    assert process.stdin is not None
    part = pod.staged(DIGEST, f".part/{WEIGHTS}")
    with files.hold(str(pod.root / ".lock"), "place"):  # of another stack, which needs long
        process.stdin.write(head((OTHER_DIGEST, len(OTHER), 0), (DIGEST, SIZE, 0)) + OTHER + TAR[:2_000_000])
        process.stdin.flush()
        until(lambda: part.exists() and part.stat().st_size > 1_000_000)
        holder = files.holder_of(str(pod.staged(OTHER_DIGEST, ".lock")))
        assert holder.startswith(f"pid {process.pid}, receive, "), "else another sender would write there"
        assert pod.blobs() == set()
    until(lambda: pod.blobs() == {OTHER_DIGEST})
    process.stdin.write(TAR[2_000_000:])
    out, _ = process.communicate(timeout=30)
    assert json.loads(out) == {"received": {OTHER_DIGEST: len(OTHER), DIGEST: SIZE}}
    assert pod.blobs() == {OTHER_DIGEST, DIGEST}


def test_what_is_no_bundle_is_refused_as_it_comes(pod: PodDirectory) -> None:
    """Its digest is right, so it is what was declared. What came after it is kept."""
    tar = bundle() + b"x" * 512
    sent = head((digest_of(tar), len(tar), 0), (DIGEST, SIZE, 0)) + tar + TAR

    answer = pod.run("receive-all", stdin=sent)

    refusal = f"{digest_of(tar)} is refused and removed: the tar goes on after its end, at byte 2048"
    assert (answer.status, answer.lines[-1]) == (1, refusal)
    assert pod.blobs() == set()
    assert missing(pod, {digest_of(tar): len(tar), DIGEST: SIZE}) == {digest_of(tar): 0, DIGEST: SIZE}
    assert pod.run("receive-all", stdin=head((DIGEST, SIZE, SIZE))).result == {"received": {DIGEST: 0}}
    assert pod.unpacked(DIGEST) == TAR


def test_a_cut_is_told_once_the_bundle_before_it_is_unpacked(pod: PodDirectory) -> None:
    sent = head((OTHER_DIGEST, len(OTHER), 0), (DIGEST, SIZE, 0)) + OTHER + TAR[:10]

    answer = pod.run("receive-all", stdin=sent)

    assert answer.lines[-1].startswith("the connection ended after 10 of ")
    assert pod.blobs() == {OTHER_DIGEST}


def test_receive_all_keeps_what_came_before_the_cut(pod: PodDirectory) -> None:
    stream = head((OTHER_DIGEST, len(OTHER), 0), (DIGEST, SIZE, 0)) + OTHER + TAR[:1234]

    answer = pod.run("receive-all", stdin=stream)

    assert (answer.status, answer.lines[-1]) == (
        1,
        f"the connection ended after 1234 of {SIZE} bytes of {DIGEST}: they are kept, run this again",
    )
    assert missing(pod, {DIGEST: SIZE, OTHER_DIGEST: len(OTHER)}) == {DIGEST: 1234}


def test_receive_all_reads_past_what_somebody_else_sent_meanwhile(pod: PodDirectory) -> None:
    pod.stage(OTHER)

    answer = pod.run("receive-all", stdin=head((OTHER_DIGEST, len(OTHER), 0), (DIGEST, SIZE, 0)) + OTHER + TAR)

    assert answer.result == {"received": {OTHER_DIGEST: 0, DIGEST: SIZE}}
    assert pod.unpacked(DIGEST) == TAR
    assert pod.blobs() == {DIGEST}, "what arrived before this run may have been cut by a power cut: place hashes it"


def test_receive_all_refuses_bytes_nobody_declared(pod: PodDirectory) -> None:
    answer = pod.run("receive-all", stdin=head((OTHER_DIGEST, len(OTHER), 0)) + OTHER + b"x")

    assert (answer.status, answer.lines[-1]) == (1, "more bytes arrived than the 1 bundles declared")


@pytest.mark.parametrize(
    ("stdin", "sentence"),
    [
        (b"", "the first line on stdin is not JSON"),
        (b"\xff\n", "the first line on stdin is not JSON"),
        (b"[]\n", "the document's bundles is missing: it must be a list"),
        (b'{"bundles": {}}\n', "the document's bundles must be a list"),
        (b'{"bundles": [1]}\n', "the document's size is missing: it must be a whole number"),
        (head((DIGEST, 10, 11)), "the document's offset 11 is not within a bundle of 10 bytes"),
        (head((DIGEST, 10, -1)), "the document's offset -1 is not within a bundle of 10 bytes"),
        (head(("../x", 10, 0)), '"../x" is not a digest: sha256: and 64 lowercase hex digits'),
    ],
)
def test_receive_all_refuses_a_list_it_cannot_follow(stdin: bytes, sentence: str, pod: PodDirectory) -> None:
    assert pod.run("receive-all", stdin=stdin) == (1, {}, [sentence])
    assert pod.snapshot() == {str(pod.units): pod.snapshot()[str(pod.units)]}


def test_missing_counts_no_blob_that_lost_bytes(pod: PodDirectory) -> None:
    pod.stage(OTHER)
    pod.place({"m": OTHER_DIGEST})
    assert missing(pod, {OTHER_DIGEST: len(OTHER)}) == {}
    pod.blob(OTHER_DIGEST).chmod(0o755)
    (pod.blob(OTHER_DIGEST) / WEIGHTS).chmod(0o644)
    (pod.blob(OTHER_DIGEST) / WEIGHTS).write_bytes(b"")

    assert missing(pod, {OTHER_DIGEST: len(OTHER)}) == {OTHER_DIGEST: 0}
    pod.run("receive-all", stdin=head((OTHER_DIGEST, len(OTHER), 0)) + OTHER)
    assert (pod.blob(OTHER_DIGEST) / WEIGHTS).read_bytes() == b"other"


Disk = namedtuple("Disk", "f_bavail f_frsize f_files f_favail")


def test_missing_says_when_the_disk_is_too_small(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    mebibyte = 1024 * 1024
    bundles = {DIGEST: 40 * mebibyte, OTHER_DIGEST: 60 * mebibyte}
    disk = Disk(164 * mebibyte, 1, 10_000, 10_000)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)

    # Both arrive (100), and 64 stay free.
    assert pod.run("missing", stdin={"bundles": bundles}).result["freeBytes"] == 164 * mebibyte
    disk = disk._replace(f_bavail=164 * mebibyte - 1)
    answer = pod.run("missing", stdin={"bundles": bundles})
    assert (answer.status, answer.lines) == (
        1,
        [
            f"the disk of {pod.root} has 164.0 MiB free and the bundles need 100.0 MiB, and 64.0 MiB must stay free: "
            "make room there, or use a larger disk"
        ],
    )

    # What has arrived of a bundle needs no room to arrive in.
    part = pod.staged(OTHER_DIGEST, ".tar.part")
    part.write_bytes(b"x")
    assert pod.run("missing", stdin={"bundles": bundles}).status == 0
    part.unlink()

    disk = Disk(10**12, 1, 10_000, 100)
    answer = pod.run("missing", stdin={"bundles": bundles})
    assert answer.lines == [f"the disk of {pod.root} has 100 inodes free and the bundles need 115: remove files there"]


def test_nothing_missing_needs_no_disk(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(0, 1, 0, 0))

    assert pod.run("missing", stdin={"bundles": {}}) == (0, {"missing": {}, "freeBytes": 0}, [])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def podctl_process(pod: PodDirectory, *arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, str(pod.program), "--root", str(pod.root), "--units-dir", str(pod.units), *arguments]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_at_once_are_serialised(pod: PodDirectory) -> None:
    pod.stage(TAR)
    with files.hold(str(pod.root / ".lock"), "place"):
        waiting = podctl_process(pod, "place")
        assert waiting.stdin is not None
        waiting.stdin.write(json.dumps({"stack": "prod", "base": "org/base", "models": {"m": DIGEST}}).encode())
        waiting.stdin.close()
        assert waiting.stderr is not None
        said = waiting.stderr.readline().decode()
        assert said.startswith(f"waiting for another podctl (pid {os.getpid()}, place, since ")
        assert waiting.poll() is None
        assert pod.blobs() == set()
    assert waiting.stdout is not None
    assert json.load(waiting.stdout)["unpacked"] == [DIGEST]
    assert (waiting.wait(30), waiting.stderr.read().decode()) == (0, f"{DIGEST} is unpacked\n")
    assert not (pod.root / ".lock").exists()


def test_waiting_for_ever_ends_with_a_sentence(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")
    Path(path).write_text("pid 1, a verb that was killed and has a long name")
    with (
        files.hold(path, "activate"),
        pytest.raises(Refusal) as refusal,
        files.hold(path, "place", seconds=0),
    ):
        pass
    holder = rf"pid {os.getpid()}, activate, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(
        rf"another podctl \({holder}\) holds {path} and did not let go of it for 0 seconds: run this again when it is "
        "done; if it hangs, end that process on the pod",
        str(refusal.value),
    )


def test_who_waits_is_told_for_whom(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people with two stacks on one pod: each sees the other's stack, and from where it is brought up."""
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 50000 10.0.0.7 22")
    pod.stage(TAR)
    pod.stage(OTHER)
    first, second = (podctl_process(pod, "place") for _ in range(2))
    with files.hold(str(pod.root / ".lock"), "test"):
        for stack, process, digest in (("acme", first, DIGEST), ("globex", second, OTHER_DIGEST)):
            assert process.stdin is not None
            document = {"stack": stack, "base": "org/base", "models": {"m": digest}}
            process.stdin.write(json.dumps(document).encode())
            process.stdin.close()
            assert process.stderr is not None
            assert b"waiting for another podctl" in process.stderr.readline()
    assert (first.wait(20), second.wait(20)) == (0, 0)
    assert pod.blobs() == {DIGEST, OTHER_DIGEST}
    assert sorted(str(path.relative_to(pod.root)) for path in pod.root.glob("refs/*/*")) == [
        "refs/acme/m",
        "refs/globex/m",
    ]

    monkeypatch.setattr(Store, "make_staging", lambda store: said.append(store.whose))
    said: list[str] = []
    pod.run("place", stdin={"stack": "acme", "base": "org/base", "models": {"m": DIGEST}})
    pod.run("secrets", stdin={"engine": "acme-base-1", "secrets": {}})
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.setenv("SUDO_USER", "ops\x1b[31m")
    pod.run("missing", stdin={"bundles": {}})
    assert said == [" of stack acme from 10.1.2.3", " of engine acme-base-1 from 10.1.2.3", " by ops\\x1b[31m"]


def test_stacks_that_come_and_go_at_once_leave_what_is_theirs(pod: PodDirectory) -> None:
    """Real processes on one pod: each stack places what others have as well, takes it away, and places it again."""
    tars = {digest_of(tar): tar for tar in (bundle(b"%d" % number * 5000) for number in range(4))}
    sizes = {digest: len(tar) for digest, tar in tars.items()}
    faults: list[object] = []

    def call(stdin: bytes, *arguments: str) -> dict[str, Any]:
        process = podctl_process(pod, *arguments)
        out, err = process.communicate(stdin, timeout=60)
        if process.returncode:
            faults.append(err)
        return dict(json.loads(out or b"{}"))

    def stack(name: str) -> None:
        document = {"stack": name, "base": "b", "models": {f"m{n}": digest for n, digest in enumerate(tars)}}
        for turn in range(3):
            asked = {"engine": names.engine_of(name, "b"), "bundles": sizes}
            answer = call(json.dumps(asked).encode(), "missing")
            lacking = sorted(answer.get("missing", {}))
            stream = head(*((digest, sizes[digest], 0) for digest in lacking)) + b"".join(tars[d] for d in lacking)
            call(stream, "receive-all")
            call(json.dumps(document).encode(), "place")
            if turn < 2:
                call(b"", "unplace", "--stack", name, "--base", "b")

    threads = [threading.Thread(target=stack, args=(name,)) for name in ("acme", "globex", "initech")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert faults == []
    assert len(list(pod.root.glob("refs/*/*"))) == 12
    assert pod.run("verify").result == {"ok": sorted(tars), "rotten": [], "strays": []}
    assert list(pod.root.rglob(".lock*")) == []


def test_a_killed_holder_holds_nothing(pod: PodDirectory) -> None:
    pod.stage(TAR)
    lock = pod.root / ".lock"
    lock.write_text("pid 1, a verb with quite a long name that was killed")

    assert pod.place({"m": DIGEST}).status == 0
    assert not lock.exists()


def test_a_lock_on_a_file_that_is_gone_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter may open the file just before its holder removes it, and lock it just after."""
    path = tmp_path / ".lock"
    real = fcntl.flock

    def removed_meanwhile(fd: int, operation: int) -> None:
        path.unlink()
        path.touch()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    assert files.try_lock(str(path)) == (None, "")


def test_of_many_that_wait_one_at_a_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    old = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(old, fcntl.LOCK_EX)
    inside: list[int] = []
    overlap: list[bool] = []

    def worker() -> None:
        with files.hold(str(path), "test"):
            inside.append(1)
            overlap.append(len(inside) > 1)
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    path.unlink()
    os.close(old)
    for thread in threads:
        thread.join(10)
    assert overlap == [False] * 4
    assert not path.exists()


def test_one_bundle_from_two_senders_arrives_once(pod: PodDirectory) -> None:
    first = podctl_process(pod, "receive-all")
    assert first.stdin is not None
    first.stdin.write(head((DIGEST, SIZE, 0)) + TAR[:1_000_000])
    first.stdin.flush()
    lock = pod.staged(DIGEST, ".lock")
    deadline = time.monotonic() + 20
    while not lock.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    second = podctl_process(pod, "receive-all")
    assert second.stderr is not None
    assert second.stdin is not None
    feeder = threading.Thread(target=second.stdin.write, args=(head((DIGEST, SIZE, 0)) + TAR,))
    feeder.start()
    said = second.stderr.readline().decode()
    assert said.startswith(f"waiting for another podctl (pid {first.pid}, receive, since ")
    first.stdin.write(TAR[1_000_000:])
    first_out, _ = first.communicate(timeout=30)
    feeder.join(30)
    second_out, _ = second.communicate(timeout=30)
    assert json.loads(first_out) == {"received": {DIGEST: SIZE}}
    assert json.loads(second_out) == {"received": {DIGEST: 0}}
    assert pod.unpacked(DIGEST) == TAR


def test_answers_are_one_line(pod: PodDirectory) -> None:
    answer: Answer = pod.run("missing", stdin={"bundles": {DIGEST: SIZE}})
    assert set(answer.result) == {"missing", "freeBytes"}
