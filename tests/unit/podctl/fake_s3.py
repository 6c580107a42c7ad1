"""A store without a cloud: objects over HTTP on loopback, and whatever else stores and networks do."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

SIGNATURE = "5ec7e75ec7e7"
QUERY = f"X-Amz-Credential=AKIAEXAMPLE&X-Amz-Signature={SIGNATURE}"


def named(digest: str) -> str:
    return f"s3://bucket/prefix/sha256/{digest.removeprefix('sha256:')}.tar"


class Reply(NamedTuple):
    """What the server answers once. `then`: close, stall (send nothing more), or trickle (a byte now and then)."""

    status: str = "200 OK"
    headers: tuple[str, ...] = ()
    body: bytes = b""
    length: int | None = None  # Content-Length where it is not the body's; -1: none is told
    then: str = "close"


def error(status: str, code: str = "", more: str = "", headers: tuple[str, ...] = ()) -> Reply:
    body = f"<Error><Code>{code}</Code>{more}<Resource>/x?{QUERY}</Resource></Error>" if code else ""
    return Reply(status, headers, body.encode())


class Asked(NamedTuple):
    digest: str
    range: str


class S3:
    """Objects over HTTP on loopback, in whole and in ranges; `replies` come first, in their order, per object."""

    def __init__(self, objects: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        self.objects = dict(objects)
        self.replies: dict[str, list[Reply]] = {}
        self.asked: list[Asked] = []
        self.sent: list[int] = []  # bytes of each body
        self.heads: list[str] = []
        self.stalled, self.closed = threading.Event(), threading.Event()
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def bundle(self, digest: str, size: int | None = None) -> dict[str, Any]:
        scheme = "https" if self._tls else "http"
        url = f"{scheme}://{self.host}/bucket/{digest}?{QUERY}"
        return {"digest": digest, "size": size or len(self.objects[digest]), "url": url, "name": named(digest)}

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(20)
            first = connection.recv(1, socket.MSG_PEEK)
            if first == b"\x16" and self._tls is None:  # of TLS
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            if first == b"C":  # of CONNECT: it is its own proxy
                self.heads.append(self._head(connection))
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if self._tls is None:
                self._answer(connection)
            else:
                with self._tls.wrap_socket(connection, server_side=True) as wrapped:
                    self._answer(wrapped)

    def _head(self, connection: socket.socket) -> str:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.recv(1)
            if not piece:
                raise ConnectionResetError
            head += piece
        return head.decode()

    def _answer(self, connection: socket.socket) -> None:
        head = self._head(connection)
        self.heads.append(head)
        digest = re.findall(r"GET /bucket/(\S+)\?" + re.escape(QUERY) + " HTTP/1.1\r\n", head)[0]
        wanted = (re.findall(r"Range: (.*)\r\n", head) or [""])[0]
        self.asked.append(Asked(digest, wanted))
        replies = self.replies.get(digest)
        reply = replies.pop(0) if replies else self._honest(self.objects.get(digest), wanted)
        length = len(reply.body) if reply.length is None else reply.length
        told = (f"Content-Length: {length}",) if length >= 0 else ()
        lines = (f"HTTP/1.1 {reply.status}", *reply.headers, *told, "Connection: close", "", "")
        connection.sendall("\r\n".join(lines).encode())
        self.sent.append(len(reply.body))
        connection.sendall(reply.body)
        if reply.then == "stall":
            self.stalled.set()
            self.closed.wait()
        while reply.then == "trickle" and not self.closed.wait(0.005):
            connection.sendall(b"w")

    def _honest(self, data: bytes | None, wanted: str) -> Reply:
        if data is None:
            return error("404 Not Found", "NoSuchKey")
        if not wanted:
            return Reply(body=data)
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(data):
            return Reply("416 Range Not Satisfiable", (f"Content-Range: bytes */{len(data)}",))
        return Reply("206 Partial Content", (ranged(start, len(data)),), data[start:])


def ranged(start: int, size: int) -> str:
    return f"Content-Range: bytes {start}-{size - 1}/{size}"
