"""What goes over the wire between boto3 and S3: counted, and held to what S3 does and moto does not.

S3 refuses bytes that do not have the checksum they came with; moto takes them. So that is done here, and whatever
faults a test asks for.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from types import SimpleNamespace
from xml.sax.saxutils import escape

import pytest
from botocore import handlers
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import BotoCoreError
from moto.core.models import botocore_stubber

Hook = Callable[[AWSPreparedRequest], "AWSResponse | None"]
_PARTS = re.compile(rb"<Part>.*?</Part>", re.DOTALL)


class _Body(BytesIO):
    def stream(self, **_: object) -> list[bytes]:
        return [self.read()]


def answer(status: int, body: str = "", headers: dict[str, str] | None = None) -> Hook:
    def respond(request: AWSPreparedRequest) -> AWSResponse:
        text = "" if request.method == "HEAD" else body
        return AWSResponse(request.url, status, headers or {}, _Body(text.encode()))

    return respond


def error(code: str, status: int = 400, message: str = "", extra: str = "", **headers: str) -> Hook:
    """An error as S3 tells it: to a HEAD, by its status alone."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(message)}</Message>{extra}</Error>"
    return answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def broken(failure: type[BotoCoreError]) -> Hook:
    def fail(request: AWSPreparedRequest) -> AWSResponse:
        raise failure(endpoint_url=request.url)

    return fail


@dataclass
class Wire:
    calls: list[str] = field(default_factory=list)
    """Operations by name, each attempt of each."""
    requests: list[AWSPreparedRequest] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds that boto3 would have waited before it tried again."""
    faults: dict[str, deque[Hook]] = field(default_factory=dict)
    flying: int = 0
    most_flying: int = 0
    landed: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    on_request: Callable[[str], None] | None = None
    """Called with each operation's name before it goes out, in the thread that asks."""
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def tap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # In moto's place, since botocore asks all handlers of a request, also after one has answered it.
        others = [each for each in handlers.BUILTIN_HANDLERS if each[1] is not botocore_stubber]
        assert len(others) == len(handlers.BUILTIN_HANDLERS) - 1
        monkeypatch.setattr(handlers, "BUILTIN_HANDLERS", [*others, ("before-send", self._sending)])
        monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=self.waits.append, time=time.time))

    def then(self, operation: str, *hooks: Hook, times: int = 1) -> None:
        """The next requests of this operation meet these; a hook that returns None lets one through."""
        self.faults.setdefault(operation, deque()).extend(hooks * times)

    def of(self, operation: str) -> list[AWSPreparedRequest]:
        return [request for name, request in zip(self.calls, self.requests, strict=True) if name == operation]

    def clear(self) -> None:
        self.calls.clear()
        self.requests.clear()

    def _sending(self, request: AWSPreparedRequest, event_name: str, **more: object) -> AWSResponse | None:
        operation = event_name.rpartition(".")[2]
        with self.changed:
            self.calls.append(operation)
            self.requests.append(request)
            self._fly(operation, 1)
        try:
            if self.on_request:
                self.on_request(operation)
            waiting = self.faults.get(operation)
            fault = waiting.popleft() if waiting else None
            answered = (fault and fault(request)) or _as_s3_would(operation, request)
            if answered:
                return answered
            if isinstance(request.body, bytearray):
                request.body = bytes(request.body)  # moto takes no other
            # moto looks and writes in two steps; S3 in one.
            with self._writing if operation in ("PutObject", "CompleteMultipartUpload") else nullcontext():
                response: AWSResponse | None = botocore_stubber(request=request, event_name=event_name, **more)
            return response
        finally:
            with self.changed:
                self._fly(operation, -1)

    def _fly(self, operation: str, change: int) -> None:
        if operation == "UploadPart":
            self.flying += change
            self.most_flying = max(self.flying, self.most_flying)
            self.landed += change < 0
            self.changed.notify_all()


def body_of(request: AWSPreparedRequest) -> bytes:
    if hasattr(request.body, "read"):
        body: bytes = request.body.read()
        request.body.seek(0)
        return body
    return bytes(request.body or b"")


def _as_s3_would(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
    body = body_of(request)
    if operation in ("PutObject", "UploadPart"):
        promised = request.headers["x-amz-checksum-sha256"].decode()
        if promised != base64.b64encode(hashlib.sha256(body).digest()).decode():
            return error("BadDigest", message="The SHA256 you specified did not match the calculated checksum.")(
                request
            )
    if operation == "CompleteMultipartUpload" and any(b"<ChecksumSHA256>" not in part for part in _PARTS.findall(body)):
        return error("InvalidRequest", message="The upload was created using a sha256 checksum.")(request)
    return None


def altered(request: AWSPreparedRequest) -> None:
    """Something on the way flips a bit."""
    body = bytearray(body_of(request))
    body[0] ^= 1
    request.body = bytes(body)
