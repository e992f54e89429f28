"""Child: one worker process and its socket. Starts it, frames messages, tells of its end.

Knows nothing of streams. The child is exec'd (never forked) from the main thread, in its own
session, without NOTIFY_SOCKET; its stderr goes to the log, rate-limited.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping

from edged import wire
from edged.engine.process import WorkerProcess
from edged.errors import EngineFault, WireError

_KILL_AFTER_S = 5.0  # a worker asked to go
_KILL_AFTER_CLOSE_S = 1.0  # a worker whose socket is closed
_LAST_FRAME_S = 1.0  # for the socket's end after the process's


WORKER = (sys.executable, "-m", "edged.worker")


class Child(asyncio.Protocol):
    """A running worker. on_message gets each frame until on_gone is called, exactly once."""

    def __init__(
        self,
        on_message: Callable[[wire.ToDaemon], None],
        on_gone: Callable[[str], None],
        command: tuple[str, ...] = WORKER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._environ = dict(environ or {})
        self._on_message = on_message
        self._on_gone = on_gone
        self._frames = wire.DaemonFrames()
        self._gone = False
        self._hung_up = False  # the socket has ended
        self._process: WorkerProcess | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def undead(self) -> bool:
        """Killed, and yet not ended."""
        return self._process is not None and self._process.undead

    async def start(self, engine: str, inherited: tuple[int, ...] = ()) -> None:
        """Exec the worker, with further open files it is to hold.

        Raises EngineFault when the process cannot be made.
        """
        process = WorkerProcess(engine, self._on_exit)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EngineFault(f"cannot start the {engine} worker: {error}") from None
        try:
            with theirs:
                command = (*self._command, "--engine", engine, "--fd", str(theirs.fileno()))
                await process.exec(command, (theirs.fileno(), *inherited), self._environ)
            self._process = process
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)
        except (OSError, RuntimeError) as error:  # no thread to wait for it (Python < 3.12)
            ours.close()
            raise EngineFault(f"cannot start the {engine} worker: {error}") from None
        except asyncio.CancelledError:
            ours.close()  # a child that was made sees end of file and exits
            raise

    def send(self, message: wire.ToWorker) -> None:
        """Raises WireError for a message that does not fit a frame."""
        frame = wire.encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def fail(self, cause: str) -> None:
        """Kill the worker and tell its end now: one that hangs in its driver never exits."""
        if self._process is not None:
            self._process.kill()
        self._end(cause)

    async def stop(self, grace_s: float = _KILL_AFTER_S) -> None:
        """Ask, wait, then kill; returns when the process is reaped, or cannot be."""
        if self._process is None:
            return
        self.send(wire.Shutdown())
        await self._process.end(grace_s)
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.messages(data):
                if self._gone:
                    return
                self._on_message(message)
        except WireError as error:
            self.fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._hung_up = True
        if self._process is None:
            return
        if self._process.exited.is_set():
            self._tell_exit()
        else:  # a worker that only closed its socket is killed; its exit tells the cause
            asyncio.get_running_loop().call_later(_KILL_AFTER_CLOSE_S, self._process.kill)

    def _on_exit(self) -> None:
        if self._hung_up:
            self._tell_exit()
        else:  # the last frame, which may tell the cause, is perhaps still to be read
            asyncio.get_running_loop().call_later(_LAST_FRAME_S, self._tell_exit)

    def _tell_exit(self) -> None:
        if self._process is not None:
            self._end(self._process.cause)

    def _end(self, cause: str) -> None:
        if not self._gone:
            self._gone = True
            self._on_gone(cause)
