"""A slow link to a pod: a TCP forwarder that lets so many bits through in a second, counts them, and can be cut."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

CHUNK = 16 * 1024


class Link:
    """Listens at `port` of this machine's loopback. Both directions have the whole rate, as a full-duplex line has.

    `sent` counts the bytes towards the pod.
    """

    def __init__(self, target: int, megabits: float | None = None) -> None:
        self.sent = 0
        self.is_cut = False
        self._cut_at: int | None = None
        self._target = target
        self._seconds = 8 / (megabits * 1e6) if megabits else 0.0
        self._lock = threading.Lock()
        self._free_at = [0.0, 0.0]
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, sent: int) -> None:
        """Break every connection once so many bytes have gone to the pod, and let no other through."""
        self._cut_at = sent

    def mend(self) -> None:
        self._cut_at, self.is_cut, self.sent = None, False, 0

    def close(self) -> None:
        self._listener.close()
        self._break()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(end)
            threading.Thread(target=self._pump, args=(near, far, 0), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, 1), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: int) -> None:
        with suppress(OSError):
            while piece := source.recv(CHUNK):
                self._wait(len(piece), direction)
                target.sendall(piece)
                if direction == 0:
                    self._count(len(piece))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def _wait(self, count: int, direction: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at[direction] = max(self._free_at[direction], now) + count * self._seconds
            left = self._free_at[direction] - now
        # A sleep is rarely shorter than this; what is not slept now is owed by the next piece.
        if left > 0.002:
            time.sleep(left)

    def _count(self, count: int) -> None:
        with self._lock:
            self.sent += count
            cut = self._cut_at is not None and self.sent >= self._cut_at
            self.is_cut = self.is_cut or cut
        if cut:
            self._break()

    def _break(self) -> None:
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
