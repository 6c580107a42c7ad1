"""The slow link of ./dev bench: what goes in comes out, is counted, and ends where it is cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bench.support.link import Link


class Sink:
    """A server that keeps what it gets, and answers each connection's end with how much that was."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                parts = []
                while piece := connection.recv(65536):
                    parts.append(piece)
                    connection.sendall(b"%d\n" % sum(map(len, parts)))
                self.got.append(b"".join(parts))

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.close()


def until(connection: socket.socket, count: int) -> None:
    answers = b""
    while f"{count}\n".encode() not in answers:
        piece = connection.recv(65536)
        assert piece, "the link was cut"
        answers += piece


def test_bytes_pass_and_are_counted(sink: Sink) -> None:
    with Link(sink.port, megabits=8) as link, socket.create_connection(("127.0.0.1", link.port)) as connection:
        connection.sendall(b"x" * 50_000)
        until(connection, 50_000)
        assert link.sent == 50_000


def test_a_cut_ends_every_connection_and_lets_none_through_until_it_is_mended(sink: Sink) -> None:
    with Link(sink.port, megabits=20) as link:  # so slow that what it has at the cut is still on its way when mended
        link.cut_at(40_000)
        with socket.create_connection(("127.0.0.1", link.port)) as connection, suppress(OSError):
            connection.sendall(b"x" * 1_000_000)
            while connection.recv(65536):
                pass
        assert link.is_cut
        assert 40_000 <= link.sent < 40_000 + 2 * 16 * 1024
        with socket.create_connection(("127.0.0.1", link.port)) as connection:
            assert connection.recv(1) == b""
        link.mend()
        with socket.create_connection(("127.0.0.1", link.port)) as connection:
            connection.sendall(b"y" * 100)
            until(connection, 100)
        assert link.sent == 100
