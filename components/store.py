"""The store: bundles as objects of an S3 bucket, each under the digest of its bytes. The only user of boto3."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from components.core.errors import UserError, printable
from components.store_errors import ATTEMPTS, code_of, no_service, refused, sentence, status_of, told
from components.store_url import StoreUrl

MIB = 1 << 20
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html: at most 10,000 parts, each of 5 MiB or more.
PART_BYTES = 8 * MIB
PARTS = 10_000
IN_FLIGHT = 4
"""Parts of one bundle under way at a time; memory holds these and the next."""
# Pulumi asks a provider for as many resources at a time as this (its gRPC server's workers, SDK 3.272).
UPLOADS = 4
REMOVED_AT_ONCE = 1000
PRESIGNED_SECONDS = 2 * 60 * 60
"""Of a presigned URL. Temporary credentials end theirs earlier, with themselves."""
RACES = 3
"""Lost races for one bundle, each followed by a look that finds nothing, before it is given up."""

# Answers to a conditional write that say: somebody else was there. Or this one was, and its answer got lost, so that
# boto3 asked again.
_LOST = ("PreconditionFailed", "ConditionalRequestConflict", "OperationAborted", "NoSuchUpload", "409", "412")

_IN_LISTS = {"Name", "Bucket", "IsTruncated", "KeyCount", "MaxKeys", "MaxUploads"}
"""What S3's lists have some of, however empty they are."""

Chunks = Callable[[], Iterator["bytes | memoryview"]]


@dataclass(frozen=True)
class Stored:
    digest: str
    size: int
    modified: datetime


@dataclass(frozen=True)
class Unfinished:
    """An upload that was begun and neither completed nor aborted; its parts are stored, and charged for."""

    digest: str
    upload: str
    started: datetime


class BundleStore:
    """One bucket's prefix. May be used by several threads at once. Every method may raise UserError."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._bucket_seen = False
        self._name = re.compile(re.escape(url.folder) + r"([0-9a-f]{64})\.tar")
        with told(url):
            # A session of its own, since boto3's default one is not made for threads.
            self._session = boto3.Session(profile_name=url.profile, region_name=url.region)
            self._client = self._connect()
        self._signing = threading.Lock()
        by_name = url.endpoint is None and ".amazonaws." in self._client.meta.endpoint_url
        self._signer = None if by_name else self._client

    def size(self, digest: str) -> int | None:
        """What is stored under this digest is so long; None where nothing is."""
        with told(self._url):
            return self._look(digest, in_bucket=self._bucket_seen)

    def ensure(self, digest: str, size: int, chunks: Chunks | None) -> bool:
        """See to it that the bundle is stored, whole or not at all, and say whether this call has put it there.

        `chunks` is called, if need be more than once, when it is not there yet.
        """
        with told(self._url):
            for _ in range(RACES):
                if self._holds(digest, size, here=chunks is not None):
                    return False
                if chunks is None:
                    raise UserError(f"{self._url.place} does not have {digest}; run `lora push` where the adapter is")
                upload = self._put if size <= part_bytes(size) else self._put_in_parts
                if upload(digest, size, chunks):
                    return True
        raise UserError(
            f"{self._url.name(digest)} was written or removed by somebody else each of {RACES} times that it was to be "
            "stored; find out who does so, and run it again"
        )

    def presigned(self, digest: str) -> str:
        """A URL with which anyone can GET the bundle for two hours: a secret."""
        with told(self._url):
            with self._signing:
                signer = self._signer = self._signer or self._at_home(digest)
            url: str = signer.generate_presigned_url(
                "get_object", Params=self._object(digest), ExpiresIn=PRESIGNED_SECONDS
            )
        return url

    def stored(self) -> Iterator[Stored]:
        """All bundles there; what has another name than a bundle's is somebody else's, and left out."""
        for page in self._pages("list_objects_v2"):
            for item in page.get("Contents", ()):
                if name := self._name.fullmatch(item["Key"]):
                    yield Stored(f"sha256:{name[1]}", item["Size"], item["LastModified"])

    def unfinished(self) -> Iterator[Unfinished]:
        for page in self._pages("list_multipart_uploads"):
            for item in page.get("Uploads", ()):
                if name := self._name.fullmatch(item["Key"]):
                    yield Unfinished(f"sha256:{name[1]}", item["UploadId"], item["Initiated"])

    def abort(self, unfinished: Unfinished) -> None:
        """Remove the parts of an upload; one that is gone by now is no fault."""
        if left := self._take_back({**self._object(unfinished.digest), "UploadId": unfinished.upload}):
            raise UserError(left)

    def remove(self, digests: Iterable[str]) -> dict[str, str]:
        """Remove bundles; of those that stay, by digest, the sentence why. What is gone by now is no fault."""
        stay, left = {}, iter(digests)
        while batch := list(islice(left, REMOVED_AT_ONCE)):
            by_key = {self._url.key(digest): digest for digest in batch}
            wanted = {"Objects": [{"Key": key} for key in by_key], "Quiet": True}
            with told(self._url):
                answer = self._client.delete_objects(Bucket=self._url.bucket, Delete=wanted)
            for fault in answer.get("Errors", ()):
                if fault.get("Code") != "NoSuchKey":
                    stay[by_key[fault["Key"]]] = refused(self._url, "DeleteObjects", fault)
        return stay

    # --- connections

    def _connect(self, region: str | None = None, style: str = "auto") -> Any:
        config = Config(
            signature_version="s3v4",
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=IN_FLIGHT * UPLOADS,
            s3=None if style == "auto" else {"addressing_style": style},
            # boto3's own CRCs, beside our SHA-256, are unknown to many services.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            client = self._session.client("s3", region_name=region, endpoint_url=self._url.endpoint, config=config)
        except ValueError as error:
            if isinstance(error, BotoCoreError):
                raise
            # Of an endpoint, all of which is in its text.
            raise UserError(
                f"{self._url.place}: boto3 makes nothing of the endpoint; correct lora-pods:store, or "
                "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 and endpoint_url in ~/.aws/config"
            ) from None
        client.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
        return client

    def _at_home(self, digest: str) -> Any:
        """A client that signs URLs of the bucket's own host in its own region of AWS.

        Another one's is told of the region by a redirection and asks there, but signs for where it was; and its URLs
        are of the global host, which redirects too as long as a bucket is new (boto3 1.44). Whoever has a URL cannot
        follow.
        """
        try:
            answer = self._client.head_bucket(Bucket=self._url.bucket)
        except ClientError as error:
            self._look(digest, in_bucket=False)  # raises the reason, if it is another than that buckets are not shown
            answer = error.response
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        return self._connect(region or self._url.region, "virtual")

    # --- looking

    def _object(self, digest: str) -> dict[str, str]:
        return {"Bucket": self._url.bucket, "Key": self._url.key(digest)}

    def _look(self, digest: str, *, in_bucket: bool = True) -> int | None:
        """The object's size. `in_bucket`: that the bucket exists is known, or will soon be found out."""
        size: int | None
        try:
            size = self._size_in(self._client.head_object(**self._object(digest)))
        except ClientError as error:
            if status_of(error) == 404 and in_bucket:
                return None
            if status_of(error) == 429 or status_of(error) >= 500:
                raise
            size = self._look_by_get(digest)
        self._bucket_seen = True
        return size

    def _size_in(self, answer: Mapping[str, Any]) -> int:
        # Every object has an ETag. A web page, such as a console's for whatever is asked of it, may have none.
        total = answer.get("ContentRange", "").rpartition("/")[2] or str(answer.get("ContentLength", ""))
        if not answer.get("ETag") or not total.isdecimal() or "text/html" in answer.get("ContentType", ""):
            raise self._no_service()
        return int(total)

    def _no_service(self) -> UserError:
        return UserError(no_service(self._url))

    def _look_by_get(self, digest: str) -> int | None:
        """The same, with a reason where it fails: answers to HEAD have no body, which is where S3 says it."""
        try:
            answer = self._client.get_object(**self._object(digest), Range="bytes=0-0")
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                return None
            if code_of(error) == "InvalidRange":
                return 0
            raise
        answer["Body"].close()
        return self._size_in(answer)

    def _holds(self, digest: str, size: int, *, here: bool) -> bool:
        """`here`: the size is that of the bytes themselves, and not what a lock says of them."""
        found = self._look(digest)
        if found not in (None, size) and not here:
            raise UserError(
                f"{self._url.place}: {self._url.name(digest)} is {found} bytes, and {size} by the lock: the lock or "
                "the object was altered; leave both, and run `lora lock` and `lora push` where the adapter is: there "
                "it can be told which"
            )
        if found not in (None, size):
            name, options = self._url.name(digest), ""
            if self._url.endpoint:
                options += f" --endpoint-url {self._url.endpoint}"
            if self._url.profile:
                options += f" --profile {printable(self._url.profile)}"
            raise UserError(
                f"{self._url.place}: {name} is {found} bytes and should be {size}: it was cut short or altered; "
                f"remove it (`aws s3 rm {name}{options}`), and run this again where the adapter is"
            )
        return found is not None

    def _pages(self, operation: str) -> Iterator[dict[str, Any]]:
        with told(self._url):
            pages = self._client.get_paginator(operation).paginate(Bucket=self._url.bucket, Prefix=self._url.folder)
            for page in pages:
                # XML of another kind, or none, reads as a list without anything in it.
                if not page.keys() & _IN_LISTS:
                    raise self._no_service()
                yield page

    # --- uploading: each of these says whether the object is this call's; False means that it has to be looked again

    def _put(self, digest: str, size: int, chunks: Chunks) -> bool:
        body = b"".join(_promised(chunks(), digest, size))
        put = partial(
            self._client.put_object,
            **self._object(digest),
            Body=body,
            ContentType="application/x-tar",
            # The digest itself: S3 hashes what arrives, and refuses other bytes.
            ChecksumSHA256=base64.b64encode(bytes.fromhex(digest.removeprefix("sha256:"))).decode(),
        )
        return self._unless_there(put, digest, size)

    def _put_in_parts(self, digest: str, size: int, chunks: Chunks) -> bool:
        begun = self._client.create_multipart_upload(
            **self._object(digest), ContentType="application/x-tar", ChecksumAlgorithm="SHA256"
        )
        upload = {**self._object(digest), "UploadId": begun["UploadId"]}
        try:
            parts = self._send(upload, in_parts(_promised(chunks(), digest, size), part_bytes(size)))
            complete = partial(self._client.complete_multipart_upload, **upload, MultipartUpload={"Parts": parts})
            done = self._unless_there(complete, digest, size)
        except BaseException as error:
            left = self._take_back(upload)
            if left and isinstance(error, (ClientError, BotoCoreError, UserError)):
                reason = str(error) if isinstance(error, UserError) else sentence(self._url, error)
                raise UserError(
                    f"{reason}; and the parts that were sent are still there ({left}): `lora gc-store --delete` "
                    "removes them"
                ) from None
            raise
        if not done:
            self._take_back(upload)
        return done

    def _unless_there(self, store: Callable[..., object], digest: str, size: int) -> bool:
        try:
            store(IfNoneMatch="*")
        except ClientError as error:
            if code_of(error) in _LOST:
                return False
            if code_of(error) != "NotImplemented":
                raise
            # Some services know no such condition; without it, a race ends with one of two equal objects.
            if self._holds(digest, size, here=True):
                return False
            store()
        return True

    def _send(self, upload: dict[str, str], parts: Iterator[bytearray]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        flying: set[Future[dict[str, Any]]] = set()
        # Left, also by an exception, only when no part is under way: a part that arrives after the upload was aborted
        # stays behind.
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for number, part in enumerate(parts, 1):
                if len(flying) == IN_FLIGHT:
                    landed, flying = wait(flying, return_when=FIRST_COMPLETED)
                    sent += [each.result() for each in landed]
                flying.add(pool.submit(self._send_part, upload, number, part))
            sent += [each.result() for each in flying]
        return sorted(sent, key=lambda part: part["PartNumber"])

    def _send_part(self, upload: dict[str, str], number: int, part: bytearray) -> dict[str, Any]:
        named = {"PartNumber": number, "ChecksumSHA256": base64.b64encode(hashlib.sha256(part).digest()).decode()}
        return {**named, "ETag": self._client.upload_part(**upload, **named, Body=part)["ETag"]}

    def _take_back(self, upload: dict[str, str]) -> str:
        """Abort it; why it is still there, if it is."""
        try:
            self._client.abort_multipart_upload(**upload)
        except (ClientError, BotoCoreError) as error:
            return "" if code_of(error) == "NoSuchUpload" else sentence(self._url, error)
        return ""


def part_bytes(size: int) -> int:
    """The size of each part (but the last) of a bundle: so that there are no more than S3 takes."""
    return PART_BYTES if size <= PARTS * PART_BYTES else -(-size // (PARTS * MIB)) * MIB


def in_parts(chunks: Iterable[bytes | memoryview], size: int) -> Iterator[bytearray]:
    """The same bytes in pieces of `size`, the last one shorter or none: each a copy, of which only one is held here."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:
            taken = view[: size - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == size:
                yield part
                part = bytearray()
    if part:
        yield part


def _promised(chunks: Iterable[bytes | memoryview], digest: str, size: int) -> Iterator[bytes | memoryview]:
    """These chunks; raises UserError at their end, or past `size`, if they are not the bytes of this digest."""
    hashed, total = hashlib.sha256(), 0
    for chunk in chunks:
        total += memoryview(chunk).nbytes
        if total > size:
            break
        hashed.update(chunk)
        yield chunk
    if total != size or f"sha256:{hashed.hexdigest()}" != digest:
        raise UserError(
            f"the adapter of {digest} changed while it was read, so it was not stored: is a training still writing "
            "there? run it again when it is done"
        )


def _with_md5(params: dict[str, Any], **_: object) -> None:
    """DeleteObjects needs a checksum; boto3 sends a CRC32, many services take only this (MissingContentMD5)."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
