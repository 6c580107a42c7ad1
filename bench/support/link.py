"""A slow link to a pod: a TCP forwarder that lets so many bits through in a second, counts them, and can be cut."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

CHUNK = 16 * 1024
# What a sleep that lasted too long may be made good of: a real line does not oversleep.
BURST_SECONDS = 0.02


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
        with self._lock:
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
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                let_through = not self.is_cut
                if let_through:
                    self._open |= {near, far}
            if not let_through:
                near.close()
                far.close()
                continue
            threading.Thread(target=self._pump, args=(near, far, 0), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, 1), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: int) -> None:
        with suppress(OSError):
            while piece := source.recv(CHUNK):
                self._wait(len(piece), direction)
                if not self._passes(source, len(piece) if direction == 0 else 0):
                    break  # a socket that was shut down still gives what it had received
                target.sendall(piece)
                if self.is_cut:
                    self._break()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()

    def _wait(self, count: int, direction: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at[direction] = max(self._free_at[direction], now - BURST_SECONDS) + count * self._seconds
            left = self._free_at[direction] - now
        # A sleep is rarely shorter than this; what is not slept now is owed by the next piece.
        if left > 0.002:
            time.sleep(left)

    def _passes(self, source: socket.socket, sent: int) -> bool:
        """Whether what came from `source` came before a cut. Counts it."""
        with self._lock:
            if source not in self._open:
                return False
            self.sent += sent
            self.is_cut = self.is_cut or (self._cut_at is not None and self.sent >= self._cut_at)
            return True

    def _break(self) -> None:
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
