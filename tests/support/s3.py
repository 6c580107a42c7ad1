"""An S3 service for tests: moto's, on an address of this machine, with all that was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "lora-pods-tests"
# No profile, role or instance of this machine's is asked for anything.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTSTESTSTESTS1",
    "AWS_SECRET_ACCESS_KEY": "CANARY-AWS-SECRET",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the bucket, without the query."""
    query: str
    range: str | None
    sent: int
    """Bytes of its body."""


@dataclass
class S3:
    """A running service with one bucket, and the requests it answered; `objects` by their keys."""

    endpoint: str
    requests: list[Request] = field(default_factory=list)

    @property
    def store(self) -> str:
        return f"s3://{BUCKET}/team?endpoint={self.endpoint}"

    @property
    def uploads(self) -> list[Request]:
        return [each for each in self.requests if each.method in ("PUT", "POST") and each.sent]

    @property
    def downloads(self) -> list[Request]:
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(".tar")]

    def objects(self) -> dict[str, bytes]:
        return {key: self._backend.get_object(BUCKET, key).value for key in list(self._backend.buckets[BUCKET].keys)}

    def put(self, key: str, body: bytes) -> None:
        self._backend.put_object(BUCKET, key, body)

    def remove(self, key: str) -> None:
        self._backend.delete_object(BUCKET, key)

    @property
    def _backend(self) -> Any:
        # In this process, so that what the tests look at is not among the requests that they count.
        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """moto's server tells each request on standard error."""


@contextmanager
def s3_service(address: str = "127.0.0.1") -> Iterator[S3]:
    """Run the service at `address`, on a port of its own, with an empty bucket."""
    service = S3("")
    answering = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        service.requests.append(
            Request(
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                environ.get("QUERY_STRING", ""),
                environ.get("HTTP_RANGE"),
                int(environ.get("CONTENT_LENGTH") or 0),
            )
        )
        return answering(environ, start_response)

    server = make_server(address, 0, app, threaded=True, request_handler=_Quiet)
    service.endpoint = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        service._backend.create_bucket(BUCKET, "us-east-1")
        yield service
    finally:
        server.shutdown()
        thread.join()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
