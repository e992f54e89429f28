"""The worker's end of the socket: frames in, frames out, and the only place it ever waits."""

from __future__ import annotations

import select
import socket

from edged import wire

# Bounds the answers to one read as well: a refused Submit is about its own size.
_LONGEST_WAIT_S = 3600.0
_READ_BYTES = 1 << 16


class LinkClosed(Exception):
    """The daemon is gone: there is nobody left to work for."""


class Link:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = wire.WorkerFrames()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: wire.ToDaemon) -> None:
        """Blocks while the daemon does not read (it always does). Raises LinkClosed."""
        try:
            self._socket.sendall(wire.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            raise LinkClosed from None

    def receive(self, timeout_s: float | None) -> list[wire.ToWorker]:
        """What has arrived; waits at most timeout_s for it (None: until something does).

        May be empty before the time is over (half a frame came). Raises LinkClosed, WireError.
        """
        if timeout_s is not None:
            timeout_s = min(max(0.0, timeout_s), _LONGEST_WAIT_S)  # poll() counts in an int
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000 + 0.999)
        if not self._poll.poll(timeout_ms):
            return []
        found: list[wire.ToWorker] = []
        while True:  # all there is: a cancel may lie behind a large submit
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                data = b""
            if not data:
                raise LinkClosed
            found += self._frames.messages(data)
            if len(data) < _READ_BYTES:
                return found
