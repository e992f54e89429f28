"""Child: one worker process and its socket. Starts it, frames messages, tells of its end.

Knows nothing of streams. The child is exec'd (never forked) from the main thread, in its own
session, without NOTIFY_SOCKET; its stderr goes to the log, rate-limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import structlog

from edged import wire
from edged.errors import EngineFault, WireError

log = structlog.get_logger("edged.worker")

_STDERR_LINES_PER_S = 20
_KILL_AFTER_S = 5.0  # a worker asked to go
_KILL_AFTER_CLOSE_S = 1.0  # a worker whose socket is closed


WORKER = (sys.executable, "-m", "edged.worker")


class Child(asyncio.Protocol):
    """A running worker. on_message gets each frame, on_gone is called exactly once."""

    def __init__(
        self,
        on_message: Callable[[wire.ToDaemon], None],
        on_gone: Callable[[str], None],
        command: tuple[str, ...] = WORKER,
    ) -> None:
        self._command = command
        self._on_message = on_message
        self._on_gone = on_gone
        self._frames = wire.DaemonFrames()
        self._gone = False
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, engine: str) -> None:
        """Exec the worker. Raises EngineFault when the process cannot be made."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--engine", engine, "--fd", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,  # vendor libraries chatter there
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"},
            )
        except OSError as error:
            ours.close()
            raise EngineFault(f"cannot start the {engine} worker: {error}") from None
        except asyncio.CancelledError:
            ours.close()  # a child that was made sees end of file and exits
            raise
        finally:
            theirs.close()
        self._tasks = [
            asyncio.create_task(self._log_output(engine)),
            asyncio.create_task(self._watch_exit()),
        ]
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, ours)

    def send(self, message: wire.ToWorker) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(message))

    def kill(self) -> None:
        """SIGKILL at once: a hung device call cannot be interrupted otherwise."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, grace_s: float = _KILL_AFTER_S) -> None:
        """Ask, wait, then kill; returns when the process is reaped."""
        if self._process is None:
            return
        self.send(wire.Shutdown())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self._process.wait()
        if self._transport is not None:
            self._transport.close()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.messages(data):
                self._on_message(message)
        except WireError as error:
            self._end(str(error))
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        # The exit watcher will tell the cause; a worker that only closed its socket is killed.
        asyncio.get_running_loop().call_later(_KILL_AFTER_CLOSE_S, self.kill)

    async def _watch_exit(self) -> None:
        assert self._process is not None
        self._end(describe_exit(await self._process.wait()))

    def _end(self, cause: str) -> None:
        if not self._gone:
            self._gone = True
            self._on_gone(cause)

    async def _log_output(self, engine: str) -> None:
        """Drain the pipe always; log at most _STDERR_LINES_PER_S lines a second."""
        assert self._process is not None and self._process.stdout is not None
        loop = asyncio.get_running_loop()
        second, count, dropped = 0.0, 0, 0
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line over the stream's limit of 64 KiB: skip it
                continue
            if not line:
                return
            if loop.time() - second >= 1.0:
                if dropped:
                    log.warning("worker_output_dropped", engine=engine, lines=dropped)
                second, count, dropped = loop.time(), 0, 0
            count += 1
            if count > _STDERR_LINES_PER_S:
                dropped += 1
                continue
            text = line.decode("utf-8", "replace").rstrip()[:1000]
            log.info("worker_output", engine=engine, pid=self.pid, line=text)


def describe_exit(code: int) -> str:
    """In words: "killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
