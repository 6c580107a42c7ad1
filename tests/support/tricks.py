"""Requests that mean one thing to a proxy and another to what is behind it, as they go over the wire."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

NOTHING = '{"error":{"message":"There is nothing here.","type":"NotFoundError","param":null,"code":404}}'

# Paths that must lead nowhere, whoever asks. `closed` in them stands for a route that is not to be reached.
NOWHERE = (
    *("/closed", "//closed", "/./closed", "/%63losed", "/closed/", "/closed;/v1/models", "/closed%3b/v1/models"),
    *("/closed?/v1/models", "/closed#/v1/models", "/closed%3f/v1/models", "/closed%23/v1/models"),
    *("/v1/models/../../closed", "//v1/..//closed", "/v1/%2e%2e/closed", "/v1/models/%2E%2e/%2e%2e/closed"),
    *("/v1%2f..%2fclosed", "/v1/models%2f..%2f..%2fclosed", "/v1/..%2fclosed", "/v1/models/..%5c..%5cclosed"),
    *("//v1/..;/closed", "/v1/..;/closed", "/v1/models/..;/..;/closed", "/v1/models;/../../closed"),
    *("/v1/%252e%252e/closed", "/v1/models/..\\..\\closed", "/v1\\models", "/v1/models/%2e%2e%3b/closed"),
    *("http://pod/closed", "http://pod/v1/models/../../closed", "https://other/closed", "http://pod/v1/..;/closed"),
    *("/V1/models", "/v1/Models", "/v1/models/", "/v1/models//", "/v1/models/x", "/v1/models.", "/v1/models;x"),
    *("/v1/models%20", "/v1/models%2f", "/v1/modelsx", "/v1/mode", "/v1", "/v1/", "/", "//", "/v1/unknown-for-now"),
)
# What a proxy and vLLM may well take for the list of models: then it is that, and takes the key.
MODELS = (
    *("/closed/../v1/models", "//v1/models", "/v1//models", "/v1/./models", "/v1/%6dodels", "/v1%2fmodels"),
    *("http://other/v1/models", "HTTP://OTHER/v1/models", "/closed/%2e%2e/v1/models"),
)
REWRITES = ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-Forwarded-Uri", "X-Original-URI", "Forwarded")


def send(port: int, request: bytes) -> tuple[int, str]:
    """-> the status, 0 if the answer has none, and the answer."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        return 0, answer.decode()
    return int(head.split()[1]), body.decode()


def request(target: str, *headers: str, version: str = "1.1", method: str = "GET", body: str = "") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: pod", "Connection: close", *headers]
    return ("\r\n".join([*lines, "", ""]) + body).encode()


def found_open(port: int, key: str, closed: str) -> Iterator[str]:
    """What gets through to vLLM at `closed` (a route of one word that it answers to anybody), or without the key."""
    authorised = f"Authorization: Bearer {key}"

    def models(headers: tuple[str, ...], **how: str) -> Iterator[str]:
        """The list of models with the key, a refusal without."""
        target = how.pop("target", "/v1/models")
        status, body = send(port, request(target, authorised, *headers, **how))
        if status != 200 or "data" not in json.loads(body):
            yield f"{target} {headers} {how} with the key: {status} {body}"
        status, body = send(port, request(target, *headers, **how))
        if status != 401:
            yield f"{target} {headers} {how} without the key: {status} {body}"

    def refused(what: bytes, *statuses: int) -> Iterator[str]:
        status, body = send(port, what)
        if status not in statuses or "data" in body:
            yield f"{what!r}: {status} {body}"

    for target in NOWHERE:
        there = target.replace("%63losed", f"%{ord(closed[0]):x}{closed[1:]}").replace("closed", closed)
        for headers in ((authorised,), ()):
            status, body = send(port, request(there, *headers))
            if (status, body) != (404, NOTHING):
                yield f"{there} {headers}: {status} {body}"
    for target in MODELS:
        yield from models((), target=target.replace("closed", closed))
    for name in REWRITES:
        yield from models((f"{name}: /{closed}",))
    yield from models((), version="1.0")
    websocket = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    yield from models(websocket)
    yield from models(("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"))
    yield from models(("X-HTTP-Method-Override: DELETE", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"))
    yield from refused(request("/v1/realtime", authorised, *websocket), 404)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE", "get"):
        yield from refused(request("/v1/models", authorised, method=method), 400, 405)
    yield from refused(b"CONNECT 127.0.0.1:18000 HTTP/1.1\r\nHost: pod\r\n\r\n", 400, 405)
    yield from refused(f"GET /{closed}\r\n".encode(), 0)
    yield from refused(request("*", authorised, method="OPTIONS"), 400)

    # Where a request ends: never open to two readings.
    post = f"POST /v1/completions HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n{authorised}\r\n"
    second = f"GET /{closed} HTTP/1.1\r\nHost: pod\r\n\r\n"
    for body_headers in (
        f"Content-Length: 0\r\nContent-Length: {len(second)}\r\n",
        f"Content-Length: {len(second)}\r\nContent-Length: {len(second)}\r\n",
        f"Content-Length: 0, {len(second)}\r\n",
        f"Content-Length: +{len(second)}\r\n",
        f"Content-Length: {len(second)}\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: identity, chunked\r\n",
        "Host: other\r\n",
    ):
        yield from refused(f"{post}{body_headers}\r\n{second}".encode(), 400, 501)
