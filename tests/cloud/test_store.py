"""Bundles in S3: which requests each thing takes, and that nothing is ever there by half."""

from __future__ import annotations

import base64
import hashlib
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from components import store as store_module
from components.core.errors import UserError
from components.store import IN_FLIGHT, MIB, PART_BYTES, PARTS, BundleStore, Stored, in_parts, part_bytes
from components.store_url import StoreUrl, parse_store_url
from tests.cloud.wire import Wire, altered, answer, body_of, error
from tests.support.s3 import BUCKET, s3_service

URL = StoreUrl(BUCKET, "team")
SMALL = b"a small adapter" * 1000
SMALL_CALLS = ["HeadObject", "PutObject"]


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def b64(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def by_tens(data: bytes, length: int = 10_000) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), length):
        yield view[start : start + length]


def put(store: BundleStore, data: bytes) -> bool:
    return store.ensure(digest_of(data), len(data), lambda: by_tens(data))


@pytest.fixture
def s3(wire: Wire) -> Any:
    """A client of the test's own, with the bucket made; what it asks is counted too, so `wire.clear()` after it."""
    client = boto3.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    wire.clear()
    return client


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of 64 KiB, where their number matters and not their size."""
    monkeypatch.setattr(store_module, "PART_BYTES", 1 << 16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1 << 16)
    return 1 << 16


def large(parts: int, part: int) -> bytes:
    return b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(parts * part // 32))


def objects(s3: Any) -> dict[str, bytes]:
    listed = s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {each["Key"]: s3.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read() for each in listed}


def pending(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads") or []]


# --- what is asked ------------------------------------------------------------------------------------------


def test_a_small_bundle_is_one_put_of_its_digest(wire: Wire, s3: Any) -> None:
    assert put(BundleStore(URL), SMALL) is True
    assert wire.calls == SMALL_CALLS
    (sent,) = wire.of("PutObject")
    assert sent.headers["If-None-Match"] == b"*"
    assert sent.url == f"https://{BUCKET}.s3.amazonaws.com/team/sha256/{digest_of(SMALL)[7:]}.tar"
    assert objects(s3) == {f"team/sha256/{digest_of(SMALL)[7:]}.tar": SMALL}


def test_a_bundle_that_is_there_is_one_head_and_not_read(wire: Wire, s3: Any) -> None:
    put(BundleStore(URL), SMALL)
    wire.clear()

    def unread() -> Iterator[bytes]:
        raise AssertionError("its bytes are not wanted")

    assert BundleStore(URL).ensure(digest_of(SMALL), len(SMALL), unread) is False
    assert wire.calls == ["HeadObject"]


def test_a_large_bundle_goes_in_parts_each_with_its_checksum(wire: Wire, s3: Any) -> None:
    data = large(2, PART_BYTES) + b"and a bit"
    assert put(BundleStore(URL), data) is True
    assert sorted(wire.calls) == sorted(
        ["HeadObject", "CreateMultipartUpload", *["UploadPart"] * 3, "CompleteMultipartUpload"]
    )
    (created,) = wire.of("CreateMultipartUpload")
    assert created.headers["x-amz-checksum-algorithm"] == b"SHA256"
    (completed,) = wire.of("CompleteMultipartUpload")
    assert completed.headers["If-None-Match"] == b"*"
    assert body_of(completed).count(b"<ChecksumSHA256>") == 3
    assert sorted(len(body_of(each)) for each in wire.of("UploadPart")) == [9, PART_BYTES, PART_BYTES]
    assert objects(s3) == {URL.key(digest_of(data)): data}
    assert pending(s3) == []


def test_one_part_is_put_and_a_byte_more_is_two_parts(wire: Wire, s3: Any, small_parts: int) -> None:
    put(BundleStore(URL), large(1, small_parts))
    assert wire.calls == SMALL_CALLS
    wire.clear()
    put(BundleStore(URL), large(1, small_parts) + b"!")
    assert wire.calls.count("UploadPart") == 2


def test_the_bundle_is_looked_for_by_one_head(wire: Wire, s3: Any) -> None:
    store = BundleStore(URL)
    put(store, SMALL)
    wire.clear()
    assert store.size(digest_of(SMALL)) == len(SMALL)
    assert store.size(digest_of(b"another")) is None
    assert wire.calls == ["HeadObject", "HeadObject"]


def test_the_first_that_is_absent_is_asked_for_twice_since_the_bucket_may_be_the_absent_one(
    wire: Wire, s3: Any
) -> None:
    store = BundleStore(URL)
    assert store.size(digest_of(SMALL)) is None
    assert store.size(digest_of(SMALL)) is None
    assert wire.calls == ["HeadObject", "GetObject", "HeadObject"]


def test_nothing_to_send_is_told(wire: Wire, s3: Any) -> None:
    with pytest.raises(UserError) as told:
        BundleStore(URL).ensure(digest_of(SMALL), len(SMALL), None)
    assert str(told.value) == (
        f"s3://{BUCKET}/team does not have {digest_of(SMALL)}; run `lora push` where the adapter is"
    )


# --- parts --------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 50))
def test_parts_are_the_same_bytes(chunks: list[bytes], size: int) -> None:
    parts = list(in_parts(chunks, size))
    assert b"".join(parts) == b"".join(chunks)
    assert all(len(part) == size for part in parts[:-1])
    assert all(0 < len(part) <= size for part in parts)


@given(st.integers(0, 5 << 40))
def test_parts_are_as_many_and_as_large_as_s3_takes(size: int) -> None:
    part = part_bytes(size)
    assert part >= PART_BYTES
    assert -(-size // part) <= PARTS
    assert part <= max(PART_BYTES, size // PARTS + MIB)


def test_a_chunk_may_change_once_it_was_taken() -> None:
    buffer = bytearray(b"aa")

    def reused() -> Iterator[memoryview]:
        for letter in (b"aa", b"bb", b"cc"):
            buffer[:] = letter
            yield memoryview(buffer)

    assert b"".join(list(in_parts(reused(), 3))) == b"aabbcc"


def test_four_parts_fly_and_one_waits(wire: Wire, s3: Any, small_parts: int) -> None:
    data, taken, most = large(12, small_parts), 0, 0

    def read() -> Iterator[memoryview]:
        nonlocal taken, most
        for part in by_tens(data, small_parts):
            taken += 1
            most = max(most, taken - wire.landed)
            yield part

    def hold_until_all_fly(operation: str) -> None:
        if operation == "UploadPart":
            with wire.changed:
                # The last ones find no company.
                assert wire.changed.wait_for(lambda: wire.most_flying == IN_FLIGHT, timeout=30)

    wire.on_request = hold_until_all_fly
    assert BundleStore(URL).ensure(digest_of(data), len(data), read) is True
    assert wire.most_flying == IN_FLIGHT
    assert most <= IN_FLIGHT + 1
    assert objects(s3) == {URL.key(digest_of(data)): data}


# --- races --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_of_two_uploaders_at_once_one_stores_it_and_both_are_content(
    wire: Wire, s3: Any, small_parts: int, parts: int
) -> None:
    data = large(parts, small_parts)
    both_found_nothing = threading.Barrier(2, timeout=30)

    def read() -> Iterator[memoryview]:
        both_found_nothing.wait()
        yield from by_tens(data)

    stores = [BundleStore(URL), BundleStore(URL)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda store: store.ensure(digest_of(data), len(data), read), stores))
    assert sorted(done) == [False, True]
    assert wire.calls.count("HeadObject") == 3
    assert objects(s3) == {URL.key(digest_of(data)): data}
    assert pending(s3) == []


@pytest.mark.parametrize("parts", [1, 3])
def test_the_loser_of_a_race_does_not_overwrite(wire: Wire, s3: Any, small_parts: int, parts: int) -> None:
    data = large(parts, small_parts)
    key = URL.key(digest_of(data))

    def outrun() -> Iterator[memoryview]:
        s3.put_object(Bucket=BUCKET, Key=key, Body=data, ChecksumSHA256=b64(data), Metadata={"by": "the other"})
        yield from by_tens(data)

    assert BundleStore(URL).ensure(digest_of(data), len(data), outrun) is False
    assert s3.head_object(Bucket=BUCKET, Key=key)["Metadata"] == {"by": "the other"}
    assert pending(s3) == []


def test_the_loser_of_a_race_looks_at_what_the_other_wrote(wire: Wire, s3: Any) -> None:
    key = URL.key(digest_of(SMALL))

    def outrun() -> Iterator[memoryview]:
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"cut", ChecksumSHA256=b64(b"cut"))
        yield from by_tens(SMALL)

    with pytest.raises(UserError, match=r"is 3 bytes and should be 15000"):
        BundleStore(URL).ensure(digest_of(SMALL), len(SMALL), outrun)


@pytest.mark.parametrize(("parts", "operation"), [(1, "PutObject"), (3, "CompleteMultipartUpload")])
def test_a_conflict_that_leaves_nothing_is_tried_again(
    wire: Wire, s3: Any, small_parts: int, parts: int, operation: str
) -> None:
    data = large(parts, small_parts)
    wire.then(operation, error("ConditionalRequestConflict", 409))
    assert put(BundleStore(URL), data) is True
    assert wire.calls.count(operation) == 2
    assert objects(s3) == {URL.key(digest_of(data)): data}
    assert pending(s3) == []


def test_a_conflict_that_does_not_end_is_told(wire: Wire, s3: Any) -> None:
    wire.then("PutObject", error("ConditionalRequestConflict", 409), times=9)
    with pytest.raises(UserError) as told:
        put(BundleStore(URL), SMALL)
    assert str(told.value) == (
        f"s3://{BUCKET}/team/sha256/{digest_of(SMALL)[7:]}.tar was written or removed by somebody else each of 3 times "
        "that it was to be stored; find out who does so, and run it again"
    )
    assert wire.calls == SMALL_CALLS * 3


def test_a_completion_whose_answer_got_lost_is_no_fault(wire: Wire, s3: Any, small_parts: int) -> None:
    """S3 did it, the connection broke, boto3 asks again, and the upload is no more."""
    data = large(3, small_parts)

    def did_it_unheard(_: Any) -> None:
        s3.put_object(Bucket=BUCKET, Key=URL.key(digest_of(data)), Body=data, ChecksumSHA256=b64(data))

    def gone(request: Any) -> Any:
        did_it_unheard(request)
        return error("NoSuchUpload", 404)(request)

    wire.then("CompleteMultipartUpload", gone)
    assert put(BundleStore(URL), data) is False
    assert objects(s3) == {URL.key(digest_of(data)): data}


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        (1, ["HeadObject", "PutObject", "HeadObject", "PutObject"]),
        (
            2,
            [
                *["HeadObject", "CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload"],
                *["HeadObject", "CompleteMultipartUpload"],
            ],
        ),
    ],
)
def test_a_service_without_conditions_is_asked_again_without(
    wire: Wire, s3: Any, small_parts: int, parts: int, calls: list[str]
) -> None:
    data = large(parts, small_parts)
    last = calls[-1]
    wire.then(last, error("NotImplemented", 501, "A header you provided implies functionality that is not implemented"))
    assert put(BundleStore(URL), data) is True
    assert wire.calls == calls
    assert [each.headers.get("If-None-Match") for each in wire.of(last)] == [b"*", None]
    assert objects(s3) == {URL.key(digest_of(data)): data}


# --- nothing by half ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("change", ["other", "shorter", "longer"])
def test_bytes_that_changed_while_they_were_read_are_not_stored(
    wire: Wire, s3: Any, small_parts: int, parts: int, change: str
) -> None:
    data = large(parts, small_parts)
    now = {"other": data[:-1] + b"?", "shorter": data[:-1], "longer": data + b"!" * 3 * small_parts}[change]
    with pytest.raises(UserError) as told:
        BundleStore(URL).ensure(digest_of(data), len(data), lambda: by_tens(now))
    assert str(told.value) == (
        f"the adapter of {digest_of(data)} changed while it was read, so it was not stored: is a training still "
        "writing there? run it again when it is done"
    )
    assert (objects(s3), pending(s3)) == ({}, [])
    assert "CompleteMultipartUpload" not in wire.calls


@pytest.mark.parametrize("parts", [1, 3])
def test_a_size_that_the_digest_never_had_is_not_stored(wire: Wire, s3: Any, small_parts: int, parts: int) -> None:
    data = large(parts, small_parts)[:-9]
    with pytest.raises(UserError, match="changed while it was read, so it was not stored"):
        BundleStore(URL).ensure(digest_of(data), len(data) + 1, lambda: by_tens(data))
    assert (objects(s3), pending(s3)) == ({}, [])


@pytest.mark.parametrize("failure", [UserError("it is gone"), KeyboardInterrupt(), OSError("disk"), SystemExit(1)])
def test_whatever_ends_the_reading_leaves_nothing(
    wire: Wire, s3: Any, small_parts: int, failure: BaseException
) -> None:
    data = large(6, small_parts)

    def read() -> Iterator[memoryview]:
        yield from by_tens(data[: 5 * small_parts], small_parts)
        raise failure

    with pytest.raises(type(failure)) as told:
        BundleStore(URL).ensure(digest_of(data), len(data), read)
    assert told.value is failure
    assert wire.calls[-1] == "AbortMultipartUpload"
    assert (wire.flying, objects(s3), pending(s3)) == (0, {}, [])


def test_a_part_that_is_refused_leaves_nothing(wire: Wire, s3: Any, small_parts: int) -> None:
    data = large(9, small_parts)
    wire.then("UploadPart", lambda _: None, lambda _: None, error("AccessDenied", 403))
    with pytest.raises(UserError, match="must allow s3:PutObject on"):
        put(BundleStore(URL), data)
    assert wire.calls[-1] == "AbortMultipartUpload"
    assert wire.calls.count("UploadPart") < 9
    assert (wire.flying, objects(s3), pending(s3)) == (0, {}, [])


def test_what_cannot_be_taken_back_is_told(wire: Wire, s3: Any, small_parts: int) -> None:
    data = large(2, small_parts)
    wire.then("CompleteMultipartUpload", error("BadDigest"))
    wire.then("AbortMultipartUpload", error("AccessDenied", 403))
    with pytest.raises(UserError) as told:
        put(BundleStore(URL), data)
    assert str(told.value) == (
        f"s3://{BUCKET}/team: what arrived is not what was sent (BadDigest), so it was not stored; run it again, and "
        "if that does not help, look for what changes bytes on the way: a proxy, a fault of memory; and the parts that "
        f"were sent are still there (s3://{BUCKET}/team: no permission: the credentials' policy must allow "
        f"s3:AbortMultipartUpload on arn:aws:s3:::{BUCKET}/team/sha256/*): `lora gc-store --delete` removes them"
    )


@pytest.mark.parametrize(("parts", "operation"), [(1, "PutObject"), (3, "UploadPart")])
def test_bytes_that_change_on_the_way_are_refused_by_s3(
    wire: Wire, s3: Any, small_parts: int, parts: int, operation: str
) -> None:
    data = large(parts, small_parts)
    wire.then(operation, altered)
    with pytest.raises(UserError, match=r"what arrived is not what was sent \(BadDigest\), so it was not stored; "):
        put(BundleStore(URL), data)
    assert (objects(s3), pending(s3)) == ({}, [])


def test_an_object_of_another_size_is_told_and_left_alone(wire: Wire, s3: Any) -> None:
    digest = digest_of(SMALL)
    s3.put_object(Bucket=BUCKET, Key=URL.key(digest), Body=b"cut", ChecksumSHA256=b64(b"cut"))
    wire.clear()
    with pytest.raises(UserError) as told:
        put(BundleStore(URL), SMALL)
    name = f"s3://{BUCKET}/team/sha256/{digest[7:]}.tar"
    assert str(told.value) == (
        f"s3://{BUCKET}/team: {name} is 3 bytes and should be 15000: it was cut short or altered; remove it "
        f"(`aws s3 rm {name}`), and run this again where the adapter is"
    )
    assert wire.calls == ["HeadObject"]


def test_the_way_to_remove_it_is_for_the_same_service() -> None:
    with s3_service() as service:
        url = parse_store_url(service.store)
        service.put(url.key(digest_of(SMALL)), b"cut")
        with pytest.raises(
            UserError, match=f"`aws s3 rm {url.name(digest_of(SMALL))} --endpoint-url {service.endpoint}`"
        ):
            put(BundleStore(url), SMALL)


def test_a_part_that_fails_at_first_is_sent_again(wire: Wire, s3: Any, small_parts: int) -> None:
    data = large(3, small_parts)
    wire.then("UploadPart", error("SlowDown", 503), error("InternalError", 500))
    assert put(BundleStore(URL), data) is True
    assert wire.calls.count("UploadPart") == 5
    assert objects(s3) == {URL.key(digest_of(data)): data}


# --- what is there ------------------------------------------------------------------------------------------


def test_bundles_are_listed_beyond_a_page_and_what_is_not_one_is_left_out(wire: Wire, s3: Any) -> None:
    held = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    hexes = [f"{number:064x}" for number in range(1003)]
    for name in hexes:
        held.put_object(BUCKET, f"team/sha256/{name}.tar", b"12")
    for key in ("team/sha256/notes.txt", "team/sha256/old/" + "0" * 64 + ".tar", "other/sha256/" + "0" * 64 + ".tar"):
        held.put_object(BUCKET, key, b"")
    found = list(BundleStore(URL).stored())
    assert wire.calls == ["ListObjectsV2"] * 2
    assert [each.digest for each in found] == [f"sha256:{name}" for name in hexes]
    assert {each.size for each in found} == {2}
    assert all(datetime.now(timezone.utc) - each.modified < timedelta(hours=1) for each in found)


def test_a_bucket_without_a_prefix(wire: Wire, s3: Any) -> None:
    store = BundleStore(StoreUrl(BUCKET, ""))
    put(store, SMALL)
    assert list(objects(s3)) == [f"sha256/{digest_of(SMALL)[7:]}.tar"]
    (found,) = store.stored()
    assert (found.digest, found.size) == (digest_of(SMALL), len(SMALL))
    assert isinstance(found, Stored)


def test_removing_takes_a_request_per_thousand_and_tells_what_stays(wire: Wire, s3: Any) -> None:
    store = BundleStore(URL)
    put(store, SMALL)
    wire.clear()
    assert store.remove([digest_of(SMALL), *(f"sha256:{number:064x}" for number in range(1000))]) == {}
    assert wire.calls == ["DeleteObjects"] * 2
    assert all(each.headers["Content-MD5"] for each in wire.requests)
    assert objects(s3) == {}


def test_removing_tells_each_that_stays(wire: Wire, s3: Any) -> None:
    stays, gone = digest_of(b"stays"), digest_of(b"gone")
    fault = "<Error><Key>{}</Key><Code>{}</Code><Message>no</Message></Error>"
    refusals = fault.format(URL.key(stays), "AccessDenied") + fault.format(URL.key(gone), "NoSuchKey")
    wire.then("DeleteObjects", answer(200, f"<?xml version='1.0'?><DeleteResult>{refusals}</DeleteResult>"))
    assert BundleStore(URL).remove([stays, gone]) == {
        stays: f"s3://{BUCKET}/team: no permission: the credentials' policy must allow s3:DeleteObject on "
        f"arn:aws:s3:::{BUCKET}/team/sha256/*"
    }


def test_unfinished_uploads_are_listed_with_their_age_and_ended(wire: Wire, s3: Any) -> None:
    digest = digest_of(SMALL)
    for key in (URL.key(digest), "team/sha256/else", "elsewhere"):
        s3.create_multipart_upload(Bucket=BUCKET, Key=key)
    store = BundleStore(URL)
    (found,) = store.unfinished()
    assert found.digest == digest
    assert datetime.now(timezone.utc) - found.started > timedelta(0)
    store.abort(found)
    store.abort(found)
    assert sorted(pending(s3)) == ["elsewhere", "team/sha256/else"]


def test_an_upload_that_cannot_be_ended_is_told(wire: Wire, s3: Any) -> None:
    s3.create_multipart_upload(Bucket=BUCKET, Key=URL.key(digest_of(SMALL)))
    store = BundleStore(URL)
    (found,) = store.unfinished()
    wire.then("AbortMultipartUpload", error("AccessDenied", 403))
    with pytest.raises(UserError) as told:
        store.abort(found)
    assert str(told.value) == (
        f"s3://{BUCKET}/team: no permission: the credentials' policy must allow s3:AbortMultipartUpload on "
        f"arn:aws:s3:::{BUCKET}/team/sha256/*"
    )


# --- presigned ----------------------------------------------------------------------------------------------


def test_a_presigned_url_is_a_get_of_two_hours_that_needs_no_header(wire: Wire, s3: Any) -> None:
    store = BundleStore(URL)
    put(store, SMALL)
    wire.clear()
    split = urlsplit(store.presigned(digest_of(SMALL)))
    query = parse_qs(split.query)
    assert split.path.endswith(URL.key(digest_of(SMALL)))
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert query["X-Amz-Expires"] == ["7200"]
    assert query["X-Amz-SignedHeaders"] == ["host"]
    assert wire.calls == ["HeadBucket"]


def test_a_presigned_url_serves_ranges_to_whoever_has_it() -> None:
    with s3_service() as service:
        store = BundleStore(parse_store_url(service.store))
        put(store, SMALL)
        url = store.presigned(digest_of(SMALL))
        with urllib.request.urlopen(url) as whole:
            assert whole.read() == SMALL
        rest = urllib.request.Request(url, headers={"Range": f"bytes={len(SMALL) - 4}-"})
        with urllib.request.urlopen(rest) as answered:
            assert (answered.status, answered.read()) == (206, SMALL[-4:])
        assert [(each.method, each.range) for each in service.downloads] == [
            ("GET", None),
            ("GET", f"bytes={len(SMALL) - 4}-"),
        ]


def test_the_same_in_parts_over_a_real_connection() -> None:
    data = large(2, PART_BYTES) + b"and a bit"
    with s3_service() as service:
        store = BundleStore(parse_store_url(service.store))
        assert put(store, data) is True
        assert put(store, data) is False
        assert service.objects() == {URL.key(digest_of(data)): data}
        # Create and complete are POSTs, of which only the latter has a body.
        assert [each.method for each in service.uploads].count("PUT") == 3
        assert {each.method for each in service.requests} == {"HEAD", "POST", "PUT"}


def elsewhere(request: Any) -> Any:
    """S3 to a request signed for another region than the bucket's."""
    if b"/eu-central-1/s3/" in request.headers["Authorization"]:
        return None
    return error("PermanentRedirect", 301, x_amz_bucket_region="eu-central-1")(request)


@pytest.mark.parametrize("may_list", [True, False])
def test_a_url_is_signed_for_the_region_in_which_the_bucket_turns_out_to_be(
    wire: Wire, s3: Any, may_list: bool
) -> None:
    put(BundleStore(URL), SMALL)
    wire.clear()
    at_home = answer(200 if may_list else 403, headers={"x-amz-bucket-region": "eu-central-1"})
    wire.then("HeadBucket", elsewhere, at_home)
    store = BundleStore(URL)
    for _ in range(2):
        split = urlsplit(store.presigned(digest_of(SMALL)))
        assert "/eu-central-1/s3/aws4_request" in parse_qs(split.query)["X-Amz-Credential"][0]
        assert split.netloc == f"{BUCKET}.s3.eu-central-1.amazonaws.com"
    assert wire.calls == ["HeadBucket", "HeadBucket", *([] if may_list else ["HeadObject"])]


def test_another_region_is_no_hindrance_to_the_rest(wire: Wire, s3: Any) -> None:
    wire.then("HeadObject", elsewhere, elsewhere)
    assert put(BundleStore(URL), SMALL) is True
    assert wire.calls == ["HeadObject", "HeadObject", "PutObject"]
    assert b"/eu-central-1/s3/" in wire.requests[-1].headers["Authorization"]


@pytest.mark.parametrize("code", ["NoSuchBucket", "ExpiredToken"])
def test_no_url_is_signed_where_nobody_could_use_it(wire: Wire, s3: Any, code: str) -> None:
    status = 404 if code == "NoSuchBucket" else 400
    for operation in ("HeadBucket", "HeadObject", "GetObject"):
        wire.then(operation, error(code, status), times=2)
    with pytest.raises(UserError, match="there is no such bucket" if status == 404 else "credentials have expired"):
        BundleStore(URL).presigned(digest_of(SMALL))
