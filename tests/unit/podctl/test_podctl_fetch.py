"""Bundles from a store: a server of the test's own says what S3 says, and does what networks do."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import itertools
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from components.on_pod.podctl import fetching, files, part, receiving, waiting
from components.on_pod.podctl.fetching import Wanted
from tests.unit.podctl.fake_s3 import QUERY, S3, SIGNATURE, Asked, Reply, error, named, ranged
from tests.unit.podctl.pods import Answer, PodDirectory, bundle, digest_of, head

TAR = bundle(b"w" * 3_000_000)
DIGEST = digest_of(TAR)
SIZE = len(TAR)
OTHER = bundle(b"other")
OTHER_DIGEST = digest_of(OTHER)
OBJECTS = {DIGEST: TAR, OTHER_DIGEST: OTHER}
PAUSES = waiting.PAUSES
TRIES = len(PAUSES) + 1
NAME = named(DIGEST)
OTHER_NAME = named(OTHER_DIGEST)
HERE = f"{DIGEST} is here (2.9 MiB)"
OTHER_HERE = f"{OTHER_DIGEST} is here (3.0 KiB)"
GO_ON = "run pulumi up again, it goes on from there"


@pytest.fixture
def s3() -> Iterator[S3]:
    server = S3(OBJECTS)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were to be made; none is."""
    made: list[float] = []
    real = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout in PAUSES:
            made.append(timeout)
            return event.is_set()
        return real(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "deserted", lambda: False)
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    return made


def fetch(pod: PodDirectory, *bundles: dict[str, Any]) -> Answer:
    """Runs the verb, and sees to it that no word and no file of it holds what opens the objects."""
    answer = pod.run("fetch", stdin={"bundles": list(bundles)})
    assert not re.search(f"{SIGNATURE}|X-Amz|AKIA|/bucket/sha", json.dumps(answer))
    for path in pod.root.rglob("*"):
        assert not path.is_file() or SIGNATURE.encode() not in path.read_bytes()
    assert not list(pod.root.glob("staging/*.lock"))
    return answer


def kept(pod: PodDirectory, digest: str = DIGEST) -> bytes | None:
    path = pod.staged(digest, ".tar.part")
    return path.read_bytes() if path.exists() else None


def keep(pod: PodDirectory, data: bytes, digest: str = DIGEST) -> None:
    path = pod.staged(digest, ".tar.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def refused(sentence: str) -> Answer:
    return Answer(1, {}, [sentence])


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_bundles_arrive_and_are_unpacked(pod: PodDirectory, s3: S3) -> None:
    answer = fetch(pod, s3.bundle(DIGEST), s3.bundle(OTHER_DIGEST))

    assert (answer.status, answer.result) == (0, {"fetched": {DIGEST: SIZE, OTHER_DIGEST: len(OTHER)}})
    assert sorted(answer.lines) == sorted([HERE, OTHER_HERE])
    assert sorted(s3.asked) == sorted([Asked(DIGEST, ""), Asked(OTHER_DIGEST, "")])
    assert (pod.unpacked(DIGEST), pod.unpacked(OTHER_DIGEST)) == (TAR, OTHER)
    assert list((pod.root / "staging").iterdir()) == []
    assert pod.run("verify").result["ok"] == sorted([DIGEST, OTHER_DIGEST])
    assert pod.place({"m": DIGEST}).result == {"unpacked": [], "dropped": [], "collected": [OTHER_DIGEST]}


def test_what_is_here_is_not_asked_for(pod: PodDirectory, s3: S3) -> None:
    pod.stage(TAR)
    pod.place({"m": DIGEST})
    pod.stage(OTHER)

    answer = fetch(pod, s3.bundle(DIGEST), s3.bundle(OTHER_DIGEST))

    assert answer == (0, {"fetched": {DIGEST: 0, OTHER_DIGEST: 0}}, [])
    assert s3.asked == []


def test_a_part_is_gone_on_with(pod: PodDirectory, s3: S3) -> None:
    pod.run("receive-all", stdin=head((DIGEST, SIZE, 0)) + TAR[:1_500_001])

    answer = fetch(pod, s3.bundle(DIGEST))

    assert answer == (0, {"fetched": {DIGEST: SIZE - 1_500_001}}, [HERE])
    assert (s3.asked, s3.sent) == ([Asked(DIGEST, "bytes=1500001-")], [SIZE - 1_500_001])
    assert pod.unpacked(DIGEST) == TAR


def test_receive_goes_on_with_what_was_fetched(pod: PodDirectory, s3: S3) -> None:
    s3.replies[DIGEST] = [Reply(body=TAR[:777], length=SIZE), *[error("403 Forbidden")] * 2]
    fetch(pod, s3.bundle(DIGEST))

    assert pod.run("missing", stdin={"bundles": {DIGEST: SIZE}}).result["missing"] == {DIGEST: 777}
    assert pod.run("receive-all", stdin=head((DIGEST, SIZE, 777)) + TAR[777:]).status == 0
    assert pod.unpacked(DIGEST) == TAR


def test_a_part_that_has_all_its_bytes_is_only_hashed(pod: PodDirectory, s3: S3) -> None:
    keep(pod, TAR)

    assert fetch(pod, s3.bundle(DIGEST)) == (0, {"fetched": {DIGEST: 0}}, [HERE])
    assert s3.asked == []
    assert pod.unpacked(DIGEST) == TAR


@pytest.mark.parametrize("kept", [TAR + b"more", b""])
def test_a_part_that_is_too_long_or_empty_is_begun_again(kept: bytes, pod: PodDirectory, s3: S3) -> None:
    keep(pod, kept)

    assert fetch(pod, s3.bundle(DIGEST)).result == {"fetched": {DIGEST: SIZE}}
    assert s3.asked == [Asked(DIGEST, "")]
    assert pod.unpacked(DIGEST) == TAR


def test_a_damaged_part_is_not_held_against_the_object(pod: PodDirectory, s3: S3) -> None:
    keep(pod, b"x" * 1000)

    assert fetch(pod, s3.bundle(DIGEST)) == (0, {"fetched": {DIGEST: 2 * SIZE - 1000}}, [HERE])
    assert s3.asked == [Asked(DIGEST, "bytes=1000-"), Asked(DIGEST, "")]
    assert pod.unpacked(DIGEST) == TAR


def test_a_server_that_ignores_ranges_is_taken_from_the_start(pod: PodDirectory, s3: S3) -> None:
    keep(pod, TAR[:1000])
    s3.replies[DIGEST] = [Reply(body=TAR)]

    assert fetch(pod, s3.bundle(DIGEST)) == (0, {"fetched": {DIGEST: SIZE}}, [HERE])
    assert s3.asked == [Asked(DIGEST, "bytes=1000-")]
    assert pod.unpacked(DIGEST) == TAR


@pytest.mark.parametrize("headers", [(ranged(999, SIZE),), (f"Content-Range: bytes 1000-2000/{SIZE}",), ()])
def test_bytes_of_another_range_are_not_taken(headers: tuple[str, ...], pod: PodDirectory, s3: S3) -> None:
    keep(pod, TAR[:1000])
    s3.replies[DIGEST] = [Reply("206 Partial Content", headers, TAR[999:])]

    answer = fetch(pod, s3.bundle(DIGEST))

    said = f"{s3.host} answers with other bytes than it was asked for: trying again in 1 s"
    assert answer == (0, {"fetched": {DIGEST: SIZE}}, [said, HERE])
    assert s3.asked == [Asked(DIGEST, "bytes=1000-"), Asked(DIGEST, "")]
    assert pod.unpacked(DIGEST) == TAR


def test_a_server_of_nothing_but_other_ranges_ends_with_a_sentence(pod: PodDirectory, s3: S3) -> None:
    keep(pod, TAR[:1000])
    s3.replies[DIGEST] = [Reply("206 Partial Content", (ranged(0, SIZE),), TAR)] * TRIES

    answer = fetch(pod, s3.bundle(DIGEST))

    assert answer.lines[-1] == (
        f"{s3.host} answers with other bytes than it was asked for: is there a proxy before it that changes what it "
        "sends?"
    )
    assert kept(pod) == TAR[:1000]


def test_the_host_is_the_one_that_was_signed_and_one_connection_is_one_answer(pod: PodDirectory, s3: S3) -> None:
    fetch(pod, s3.bundle(DIGEST))

    assert s3.heads == [
        f"GET /bucket/{DIGEST}?{QUERY} HTTP/1.1\r\nHost: {s3.host}\r\nAccept-Encoding: identity\r\n"
        "Connection: close\r\n\r\n"
    ]


def test_one_that_comes_twice_in_the_list_is_fetched_once(pod: PodDirectory, s3: S3) -> None:
    assert fetch(pod, s3.bundle(DIGEST), s3.bundle(DIGEST)) == (0, {"fetched": {DIGEST: SIZE}}, [HERE])
    assert s3.asked == [Asked(DIGEST, "")]


def test_four_come_at_the_same_time_and_no_more(pod: PodDirectory, s3: S3) -> None:
    tars = [bundle(b"%d" % n) for n in range(6)]
    four, five = threading.Barrier(4, timeout=10), threading.Barrier(5, timeout=0.3)
    honest, asked = s3._honest, itertools.count(1)

    def slow(data: bytes | None, wanted: str) -> Reply:
        with contextlib.suppress(threading.BrokenBarrierError):
            order = next(asked)
            if order <= 4:
                four.wait()
            if order <= 5:
                five.wait()
        return honest(data, wanted)

    s3._honest = slow  # type: ignore[method-assign]
    s3.objects = {digest_of(tar): tar for tar in tars}

    answer = fetch(pod, *map(s3.bundle, s3.objects))

    assert answer.result == {"fetched": {digest: len(tar) for digest, tar in s3.objects.items()}}
    assert (four.broken, five.broken) == (False, True)


def test_no_bundles_are_nothing_to_do(pod: PodDirectory) -> None:
    assert fetch(pod) == (0, {"fetched": {}}, [])


# --- what passes ----------------------------------------------------------------------------------------------------


def test_a_cut_goes_on_from_where_it_was(pod: PodDirectory, s3: S3, waited: list[float]) -> None:
    s3.replies[DIGEST] = [
        Reply(body=TAR[:500_000], length=SIZE),
        Reply("206 Partial Content", (ranged(500_000, SIZE),), TAR[500_000:800_000], SIZE - 500_000),
    ]

    answer = fetch(pod, s3.bundle(DIGEST))

    cut = f"the connection to {s3.host} was cut: trying again in"
    assert answer == (0, {"fetched": {DIGEST: SIZE}}, [f"{cut} 1 s", f"{cut} 2 s", HERE])
    assert [asked.range for asked in s3.asked] == ["", "bytes=500000-", "bytes=800000-"]
    assert s3.sent == [500_000, 300_000, SIZE - 800_000]
    assert waited == [1, 2]
    assert pod.unpacked(DIGEST) == TAR


def test_a_line_that_is_cut_again_and_again_brings_it_as_long_as_each_try_brings_much(
    pod: PodDirectory, s3: S3, waited: list[float]
) -> None:
    tar = bundle(b"w" * 12_000_000)
    digest, step = digest_of(tar), files.PIECE
    s3.objects[digest] = tar
    starts = range(0, len(tar) - step, step)
    assert len(starts) > TRIES
    s3.replies[digest] = [
        Reply("206 Partial Content" if at else "200 OK", (ranged(at, len(tar)),), tar[at : at + step], len(tar) - at)
        for at in starts
    ]

    assert fetch(pod, s3.bundle(digest)).result == {"fetched": {digest: len(tar)}}
    assert [asked.range for asked in s3.asked[1:]] == [f"bytes={at + step}-" for at in starts]
    assert set(waited) == {1}


def test_what_arrived_before_the_last_cut_is_kept_for_the_next_run(
    pod: PodDirectory, s3: S3, waited: list[float]
) -> None:
    cuts = [Reply(body=TAR[:1000], length=SIZE)]
    cuts += [Reply("206 Partial Content", (ranged(1000, SIZE),), b"", SIZE - 1000)] * (TRIES - 1)
    s3.replies[DIGEST] = cuts

    answer = fetch(pod, s3.bundle(DIGEST))

    assert (answer.status, answer.lines[-1]) == (1, f"the connection to {s3.host} was cut: {GO_ON}")
    assert waited == list(PAUSES) == sorted(set(PAUSES))
    assert (kept(pod), pod.staged(DIGEST).exists()) == (TAR[:1000], False)

    s3.asked.clear()
    assert fetch(pod, s3.bundle(DIGEST)).result == {"fetched": {DIGEST: SIZE - 1000}}
    assert s3.asked == [Asked(DIGEST, "bytes=1000-")]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (error("503 Slow Down", "SlowDown"), "503 SlowDown"),
        (error("500 Internal Server Error", "InternalError"), "500 InternalError"),
        (error("502 Bad Gateway"), "502"),
        (error("429 Too Many Requests"), "429"),
        (error("400 Bad Request", "RequestTimeout"), "400 RequestTimeout"),
    ],
)
def test_a_busy_store_is_asked_again(reply: Reply, said: str, pod: PodDirectory, s3: S3, waited: list[float]) -> None:
    keep(pod, TAR[:5])
    s3.replies[DIGEST] = [reply] * 2

    answer = fetch(pod, s3.bundle(DIGEST))

    again = f"{s3.host} answers {said}: trying again in"
    assert answer == (0, {"fetched": {DIGEST: SIZE - 5}}, [f"{again} 1 s", f"{again} 2 s", HERE])
    assert s3.asked == [Asked(DIGEST, "bytes=5-")] * 3
    assert waited == [1, 2]


def test_a_store_that_stays_busy_is_left_alone_in_the_end(pod: PodDirectory, s3: S3) -> None:
    digests = [digest_of(bundle(b"%d" % n)) for n in range(9)]
    s3.objects = dict.fromkeys(digests, TAR)
    s3.replies = {digest: [error("503 Slow Down", "SlowDown")] * TRIES for digest in digests}

    answer = fetch(pod, *map(s3.bundle, digests))

    assert answer.lines[-1] == (f"{s3.host} answers 503 SlowDown: it is busy or out of order; when it is not, {GO_ON}")
    assert sum("trying again" not in line for line in answer.lines) == 1
    assert len({asked.digest for asked in s3.asked}) < len(digests)


@pytest.mark.parametrize("then", ["stall", "trickle"])
def test_a_store_that_goes_silent_counts_as_cut(
    then: str, pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "STALL_SECONDS", 1.0)
    s3.replies[DIGEST] = [Reply(body=TAR[:100_000], length=SIZE, then=then)]

    answer = fetch(pod, s3.bundle(DIGEST))

    silent = f"{s3.host} sends nothing, or next to nothing, for 1 seconds: trying again in 1 s"
    assert (answer.status, answer.lines) == (0, [silent, HERE])
    first, second = (asked.range for asked in s3.asked)
    start = int(second.removeprefix("bytes=").removesuffix("-"))
    assert (first, start >= 100_000, start == 100_000) == ("", True, then == "stall")
    assert pod.unpacked(DIGEST) == TAR


def test_a_fetch_nobody_waits_for_ends_at_once_and_keeps_what_came(
    pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "deserted", lambda: s3.stalled.is_set() and (kept(pod) or b"")[999:] != b"")
    s3.replies[DIGEST] = [Reply(body=TAR[:1000], length=SIZE, then="stall")]

    answer = fetch(pod, s3.bundle(DIGEST))

    assert answer == refused("the run that wanted the bundles was interrupted: what arrived of them is kept")
    assert (kept(pod), s3.asked) == (TAR[:1000], [Asked(DIGEST, "")])


def test_no_pause_is_waited_out_for_nobody(
    pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    monkeypatch.setattr(waiting, "PAUSES", (3600.0,))  # which the fixture lets be a real one
    monkeypatch.setattr(waiting, "deserted", lambda: bool(s3.sent))
    s3.replies[DIGEST] = [error("503 Slow Down", "SlowDown")]

    assert fetch(pod, s3.bundle(DIGEST)).lines[-1] == (
        "the run that wanted the bundles was interrupted: what arrived of them is kept"
    )


def test_one_bundle_of_two_runs_comes_once(pod: PodDirectory, s3: S3) -> None:
    pod.stage(OTHER)  # makes the directory
    argv = [sys.executable, str(pod.program), "--root", str(pod.root), "--units-dir", str(pod.units), "fetch"]
    with files.hold(str(pod.staged(DIGEST, ".lock")), "receive"):
        waiting = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert waiting.stdin is not None
        assert waiting.stderr is not None
        waiting.stdin.write(json.dumps({"bundles": [s3.bundle(DIGEST)]}).encode())
        waiting.stdin.close()
        waiting.stdin = None
        said = waiting.stderr.readline().decode()
        assert said.startswith(f"waiting for another podctl (pid {os.getpid()}, receive, since ")
        assert SIGNATURE.encode() not in Path(f"/proc/{waiting.pid}/cmdline").read_bytes()
        pod.stage(TAR)
    out, _ = waiting.communicate(timeout=30)
    assert json.loads(out) == {"fetched": {DIGEST: 0}}
    assert s3.asked == []


# --- what the store says --------------------------------------------------------------------------------------------


EXPIRED = "<Message>Request has expired</Message><Expires>2026-01-01T00:00:00Z</Expires>"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            error("403 Forbidden", "AccessDenied", EXPIRED),
            "the link to it is over (403 AccessDenied): the clock of the machine that runs pulumi is behind, or this "
            f"took too long; set the clock right there, and {GO_ON}",
        ),
        (
            error("403 Forbidden", "AccessDenied", "<Message>Request is not valid yet</Message>"),
            "the link to it is not valid yet (403 AccessDenied): the clock of the machine that runs pulumi is ahead; "
            f"set it right there, and {GO_ON}",
        ),
        (
            error("403 Forbidden", "RequestTimeTooSkewed"),
            "the link to it is not valid yet (403 RequestTimeTooSkewed): the clock of the machine that runs pulumi is "
            f"ahead; set it right there, and {GO_ON}",
        ),
        (
            error("400 Bad Request", "ExpiredToken", "<Message>The provided token has expired.</Message>"),
            "the credentials that its link was made with have ended: log in anew on the machine that runs pulumi, and "
            f"{GO_ON}",
        ),
        (
            error("403 Forbidden", "SignatureDoesNotMatch", f"<StringToSign>{QUERY}</StringToSign>"),
            "the store does not take the credentials that its link was made with (403 SignatureDoesNotMatch): correct "
            f"them on the machine that runs pulumi, and {GO_ON}",
        ),
        (
            error("403 Forbidden", "AccessDenied", "<Message>Access Denied</Message>"),
            "the store does not give it (403 AccessDenied): the credentials on the machine that runs pulumi need "
            "s3:GetObject for it, and s3:ListBucket, without which an object that is not there looks the same",
        ),
        (
            error("403 Forbidden", "AccessDenied", "<Message>x is not authorized to perform: kms:Decrypt</Message>"),
            "the store does not give it (403 AccessDenied): the credentials on the machine that runs pulumi need "
            "kms:Decrypt on the key that it is encrypted with",
        ),
        (
            error("403 Forbidden", "InvalidObjectState"),
            "it lies in an archive (403 InvalidObjectState): restore it, and keep the bucket's lifecycle rules from "
            "what is pushed",
        ),
        (
            error("404 Not Found", "NoSuchKey"),
            "the store has no such object: run `lora push` where the adapter is, then pulumi up again",
        ),
        (
            error("404 Not Found", "NoSuchBucket"),
            "its bucket does not exist: correct lora-pods:store, or make the bucket and run `lora push`",
        ),
        (
            Reply(body=TAR[:-1]),
            f"it has {SIZE - 1} bytes in the store where {SIZE} were pushed: it was altered; remove the object, then "
            "run `lora push`",
        ),
        (
            Reply(body=TAR + b"x"),
            f"it has {SIZE + 1} bytes in the store where {SIZE} were pushed: it was altered; remove the object, then "
            "run `lora push`",
        ),
        (
            Reply(body=TAR + b"x", length=-1),
            f"it has more than {SIZE} bytes in the store where {SIZE} were pushed: it was altered; remove the object, "
            "then run `lora push`",
        ),
        (
            Reply(body=b"x" + TAR[1:]),
            f"its bytes are not those that its name says (they have the digest {digest_of(b'x' + TAR[1:])}) and are "
            "thrown away: remove the object, then run `lora push`",
        ),
        (
            Reply(body=TAR[:-1] + b"x"),
            f"its bytes are not those that its name says (they have the digest {digest_of(TAR[:-1] + b'x')}) and are "
            "thrown away: remove the object, then run `lora push`",
        ),
    ],
)
def test_what_is_wrong_with_an_object_is_a_sentence(reply: Reply, said: str, pod: PodDirectory, s3: S3) -> None:
    s3.replies[DIGEST] = [reply]

    assert fetch(pod, s3.bundle(DIGEST)) == refused(f"{NAME}: {said}")
    assert s3.asked == [Asked(DIGEST, "")]
    assert (kept(pod) or b"", pod.staged(DIGEST).exists()) == (b"", False)


@pytest.mark.parametrize(
    ("reply", "said", "region"),
    [
        (
            error("301 Moved Permanently", "PermanentRedirect", headers=("x-amz-bucket-region: eu-west-1",)),
            "301 PermanentRedirect",
            "eu-west-1",
        ),
        (
            error("400 Bad Request", "AuthorizationQueryParametersError", "<Region>us-west-2</Region>"),
            "400 AuthorizationQueryParametersError",
            "us-west-2",
        ),
        (error("302 Found"), "302", "…"),
    ],
)
def test_no_redirect_is_followed(reply: Reply, said: str, region: str, pod: PodDirectory, s3: S3) -> None:
    """A link counts for its host alone: what stands elsewhere is somebody else's, or the bucket's other region."""
    s3.replies[DIGEST] = [reply._replace(headers=(*reply.headers, f"Location: http://{s3.host}/bucket/x?{QUERY}"))]

    assert fetch(pod, s3.bundle(DIGEST)) == refused(
        f"{NAME}: {s3.host} sends this pod elsewhere ({said}), where the link to it does not count: name the bucket's "
        f"region in lora-pods:store (?region={region})"
    )
    assert len(s3.asked) == 1


@pytest.mark.parametrize(
    ("status", "headers", "has"),
    [
        ("416 Range Not Satisfiable", ("Content-Range: bytes */900",), "900"),
        ("416 Range Not Satisfiable", (), "fewer"),
        ("206 Partial Content", ("Content-Range: bytes 1000-1999/2000",), "2000"),
    ],
)
def test_an_object_that_changed_its_size_since_is_altered(
    status: str, headers: tuple[str, ...], has: str, pod: PodDirectory, s3: S3
) -> None:
    keep(pod, TAR[:1000])
    s3.replies[DIGEST] = [Reply(status, headers)]

    assert fetch(pod, s3.bundle(DIGEST)) == refused(
        f"{NAME}: it has {has} bytes in the store where {SIZE} were pushed: it was altered; remove the object, then "
        "run `lora push`"
    )
    assert kept(pod) == TAR[:1000]


def test_what_is_no_s3_is_asked_about(pod: PodDirectory, s3: S3) -> None:
    s3.replies[DIGEST] = [error("418 I'm a teapot")]

    assert fetch(pod, s3.bundle(DIGEST)) == refused(
        f"{NAME}: {s3.host} answers 418: is it the S3 service that lora-pods:store names?"
    )


def test_an_endless_error_is_not_read_to_its_end(pod: PodDirectory, s3: S3) -> None:
    body = b"<Code>AccessDenied</Code>" + b" " * fetching.SLOWEST
    s3.replies[DIGEST] = [Reply("403 Forbidden", body=body, length=10**12, then="stall")]

    assert fetch(pod, s3.bundle(DIGEST)).lines[0].startswith(f"{NAME}: the store does not give it (403 AccessDenied)")


def test_a_code_that_repeats_the_request_is_not_said(pod: PodDirectory, s3: S3) -> None:
    s3.replies[DIGEST] = [error("403 Forbidden", QUERY)]

    assert fetch(pod, s3.bundle(DIGEST)).lines[0].startswith(f"{NAME}: the store does not give it (403): ")


def test_what_is_wrong_with_several_is_told_together_and_the_others_are_kept(pod: PodDirectory, s3: S3) -> None:
    absent = sorted("sha256:" + f"{n:064x}" for n in range(5))
    s3.replies[OTHER_DIGEST] = [Reply(body=OTHER + b"x")]

    answer = fetch(pod, *(s3.bundle(digest, 10) for digest in absent), s3.bundle(DIGEST), s3.bundle(OTHER_DIGEST))

    names = ", ".join(map(named, absent[:3]))
    assert (answer.status, answer.result) == (1, {})
    assert answer.lines == [
        HERE,
        "not every bundle could be fetched:",
        f"- {names} and 2 more: the store has no such object: run `lora push` where the adapter is, then pulumi up "
        "again",
        f"- {OTHER_NAME}: it has {len(OTHER) + 1} bytes in the store where {len(OTHER)} were pushed: it was altered; "
        "remove the object, then run `lora push`",
    ]
    assert pod.unpacked(DIGEST) == TAR


# --- the network and the disk ---------------------------------------------------------------------------------------


def at(host: str, scheme: str = "https") -> dict[str, Any]:
    return {"digest": DIGEST, "size": SIZE, "url": f"{scheme}://{host}/bucket/{DIGEST}?{QUERY}", "name": NAME}


def needs(access: str = "HTTPS") -> str:
    return (
        f"it needs {access} access to the store; open that (security group, firewall, proxy), or correct the endpoint "
        "in lora-pods:store"
    )


def test_a_host_that_has_no_address_is_named_at_once(
    pod: PodDirectory, monkeypatch: pytest.MonkeyPatch, waited: list[float]
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    assert fetch(pod, at("bucket.s3.example.com")) == refused(
        f"this pod cannot find the address of bucket.s3.example.com (Name or service not known): {needs()}"
    )
    assert waited == []


def test_a_name_server_that_is_away_is_asked_again(pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = socket.getaddrinfo, [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")]

    def away_once(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", away_once)

    assert fetch(pod, s3.bundle(DIGEST)).lines == [
        "this pod cannot find the address of 127.0.0.1 (Temporary failure in name resolution): trying again in 1 s",
        HERE,
    ]


def test_a_host_that_lets_nobody_in_is_named_once(pod: PodDirectory, s3: S3, waited: list[float]) -> None:
    s3.close()

    answer = fetch(pod, s3.bundle(DIGEST), s3.bundle(OTHER_DIGEST))

    assert (answer.status, answer.lines[-1]) == (
        1,
        f"this pod cannot connect to {s3.host} (Connection refused): {needs('HTTP')}",
    )
    assert sum("trying again" not in line for line in answer.lines) == 1
    assert set(waited) == set(PAUSES)


def test_a_host_behind_a_wall_is_named(pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)

    assert fetch(pod, at("bucket.s3.example.com")).lines[-1] == (
        f"this pod cannot connect to bucket.s3.example.com within 20 seconds: {needs()}"
    )


class Certificate(NamedTuple):
    served: ssl.SSLContext
    path: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """One for 127.0.0.1 that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a store of the test's own")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "store.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return Certificate(context, path)


@pytest.fixture
def https(certificate: Certificate) -> Iterator[S3]:
    server = S3(OBJECTS, certificate.served)
    yield server
    server.close()


def test_a_certificate_nobody_vouches_for_ends_it(pod: PodDirectory, https: S3, waited: list[float]) -> None:
    answer = fetch(pod, https.bundle(DIGEST))

    assert len(answer.lines) == 1
    assert re.fullmatch(
        rf"this pod does not trust the certificate of {https.host} \(self.signed certificate\): install the system's "
        r"CA certificates there \(package ca-certificates\), add to them the authority of a store of your own, and "
        r"check the pod's clock",
        answer.lines[0],
    )
    assert (https.asked, waited) == ([], [])


def test_one_that_the_system_trusts_is_taken(
    pod: PodDirectory, https: S3, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    https.replies[DIGEST] = [Reply(body=TAR[:1000], length=SIZE)]

    answer = fetch(pod, https.bundle(DIGEST))

    assert answer.lines == [f"the connection to {https.host} was cut: trying again in 1 s", HERE]
    assert [asked.range for asked in https.asked] == ["", "bytes=1000-"]
    assert pod.unpacked(DIGEST) == TAR


def test_silence_over_tls_is_ended_from_outside(
    pod: PodDirectory, https: S3, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    monkeypatch.setattr(waiting, "deserted", lambda: https.stalled.is_set())
    https.replies[DIGEST] = [Reply(body=TAR[:1000], length=SIZE, then="stall")]

    assert fetch(pod, https.bundle(DIGEST)) == refused(
        "the run that wanted the bundles was interrupted: what arrived of them is kept"
    )


def test_something_else_than_tls_is_named(pod: PodDirectory, s3: S3) -> None:
    answer = fetch(pod, at(s3.host))

    assert len(answer.lines) == 1
    assert re.fullmatch(rf"this pod cannot speak TLS with {s3.host} \([A-Z_]+\): {re.escape(needs())}", answer.lines[0])


def test_https_goes_through_the_proxy_which_sees_the_host_alone(
    pod: PodDirectory, https: S3, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    monkeypatch.setenv("https_proxy", f"http://me:p%40ss@{https.host}")
    behind = https.bundle(DIGEST)
    behind["url"] = behind["url"].replace(https.host, "127.0.0.1:9")

    assert fetch(pod, behind).status == 0
    connect, get = https.heads
    assert re.match(r"CONNECT 127\.0\.0\.1:9 HTTP/1\.[01]\r\n", connect)
    assert "Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in connect
    assert QUERY not in connect
    assert get.startswith(f"GET /bucket/{DIGEST}?{QUERY} HTTP/1.1\r\nHost: 127.0.0.1:9\r\n")
    assert "Proxy" not in get

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pod.run("gc")
    https.heads.clear()
    assert fetch(pod, https.bundle(DIGEST)).status == 0
    assert len(https.heads) == 1


def test_a_proxy_that_refuses_is_named(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")

        answer = fetch(pod, at("bucket.s3.example.com"))

        listener.shutdown(socket.SHUT_RDWR)
    assert answer.lines[-1] == (
        f"this pod cannot connect to bucket.s3.example.com through the proxy 127.0.0.1:{port} (the proxy answers 403): "
        f"{needs()}"
    )


def test_a_proxy_of_another_kind_is_refused(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://me:secret@127.0.0.1:1080")

    assert fetch(pod, at("bucket.s3.example.com")) == refused(
        "https_proxy in this pod's environment is not http://HOST:PORT: correct it there"
    )


def test_a_url_over_http_is_shown_to_no_proxy(pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    assert fetch(pod, s3.bundle(DIGEST)).status == 0


def test_a_full_disk_is_said_once_and_nothing_stays_on_it(
    pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = receiving.pump

    def filling(stream: Any, arriving: part.Part, limit: int) -> int:
        real(stream, arriving, 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(receiving, "pump", filling)

    assert fetch(pod, s3.bundle(DIGEST), s3.bundle(OTHER_DIGEST)) == refused(
        f"the disk of {pod.root} is full: make room there, or use a larger disk, and run pulumi up again"
    )
    assert list((pod.root / "staging").iterdir()) == []


def test_what_nobody_foresaw_shows_no_url(pod: PodDirectory, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(response: object, wanted: Wanted, offset: int) -> None:
        raise RuntimeError(wanted.url.geturl())

    monkeypatch.setattr(fetching, "check_answer", broken)

    answer = fetch(pod, s3.bundle(DIGEST))

    assert (answer.status, len(answer.lines)) == (1, 1)
    assert answer.lines[0].startswith("podctl fetch failed in a way nobody foresaw: RuntimeError in broken, line ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"digest": "x"}, '"x" is not a digest: sha256: and 64 lowercase hex digits'),
        ({"digest": None}, "the document's digest is missing: it must be text"),
        ({"size": "1"}, "the document's size must be a whole number"),
        ({"size": 0}, f"the document's size of {NAME} must be a number of bytes"),
        ({"name": None}, "the document's name is missing: it must be text"),
        ({"url": 1}, "the document's url must be text"),
        ({"url": f"ftp://host/?{QUERY}"}, f"the document's url of {NAME} is not an http or https URL"),
        ({"url": f"http:///x?{QUERY}"}, f"the document's url of {NAME} is not an http or https URL"),
        ({"url": f"http://me:{SIGNATURE}@host/x"}, f"the document's url of {NAME} is not an http or https URL"),
        ({"url": f"http://host:99999/x?{QUERY}"}, f"the document's url of {NAME} is not an http or https URL"),
        ({"url": f"http://host/x?{QUERY} HTTP/1.1\r\n"}, f"the document's url of {NAME} is not an http or https URL"),
    ],
)
def test_a_list_that_cannot_be_followed_is_refused(
    change: dict[str, Any], sentence: str, pod: PodDirectory, s3: S3
) -> None:
    assert fetch(pod, {**s3.bundle(DIGEST), **change}, s3.bundle(OTHER_DIGEST)) == refused(sentence)
    assert s3.asked == []
    assert not pod.root.exists()
