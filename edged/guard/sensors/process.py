"""Disposable: one child process that may hang in a driver, and never takes us with it.

Runs a tool to its end, or asks a long-lived child line by line. What is late is killed, and as
long as it does not die (a driver may hold it) no other is started: processes never pile up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from edged.guard.sensors import SensorError

log = structlog.get_logger("edged.guard")

MOST_BYTES = 256 * 1024  # of output; a table of 64 chips has 20 KiB
_LAST_WORDS_S = 0.5  # for the output of a process that has ended
_GOODBYE_S = 0.5  # for a child whose input is closed
_DIE_WITHIN_S = 1.0


@dataclass(frozen=True)
class Ended:
    code: int
    out: bytes
    err: bytes


def kill_group(pid: int) -> None:
    """The child leads a session of its own; what it started goes with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Child(asyncio.SubprocessProtocol):
    """Collects output, wakes whoever waits, and frees everything when a discarded child ends."""

    def __init__(self) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.exited = self.too_much = self.discarded = False
        self._open_pipes = {1, 2}
        self._waiting: set[asyncio.Future[None]] = set()
        self.transport: asyncio.SubprocessTransport | None = None

    @property
    def pid(self) -> int:
        return self.transport.get_pid() if self.transport is not None else 0

    @property
    def silent(self) -> bool:
        """It will print nothing more."""
        return not self._open_pipes

    @property
    def mute(self) -> bool:
        """No answer can come any more."""
        return 1 not in self._open_pipes

    @property
    def end(self) -> str:
        code = (self.transport.get_returncode() if self.transport else None) or 0
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for the condition; returns whether it holds."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + seconds
        while not condition():
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return False
            news: asyncio.Future[None] = loop.create_future()
            self._waiting.add(news)
            timer = loop.call_later(left_s, _wake, news)
            try:
                await news
            finally:
                timer.cancel()
                self._waiting.discard(news)
        return True

    def write(self, data: bytes) -> None:
        pipe = self.transport.get_pipe_transport(0) if self.transport is not None else None
        if isinstance(pipe, asyncio.WriteTransport) and not pipe.is_closing():
            pipe.write(data)

    def close_pipes(self, *numbers: int) -> None:
        for number in numbers:
            pipe = self.transport.get_pipe_transport(number) if self.transport else None
            if pipe is not None:
                pipe.close()

    def _news(self) -> None:
        for waiting in self._waiting:
            _wake(waiting)

    # asyncio.SubprocessProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.out if fd == 1 else self.err
        if len(kept) + len(data) > MOST_BYTES:
            self.too_much = True
            self.close_pipes(fd)
        else:
            kept += data
        self._news()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        self._news()

    def process_exited(self) -> None:
        self.exited = True
        self._news()
        if self.discarded and self.transport is not None:
            self.transport.close()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Disposable:
    """what: its name in error messages. environ: variables besides our own."""

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        kill: Callable[[int], None] = kill_group,
    ) -> None:
        self._what = what
        self._command = tuple(command)
        self._environ = dict(environ or {})
        self._kill = kill
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the child that lives, wanted or not."""
        return None if self._child is None or self._child.exited else self._child.pid

    async def run(self, timeout_s: float) -> Ended:
        """Start it, wait for its end. Raises SensorError when it cannot start or is late."""
        child = await self._start(asyncio.subprocess.DEVNULL)
        try:
            ended = await child.until(lambda: child.exited or child.too_much, timeout_s)
            if child.too_much:
                raise SensorError(f"{self._what} printed more than {MOST_BYTES} bytes; stopped it")
            if not ended:
                raise SensorError(f"{self._what} did not end within {timeout_s:g} s; stopped it")
            await child.until(lambda: child.silent, _LAST_WORDS_S)
            code = child.transport.get_returncode() if child.transport else None
            return Ended(code or 0, bytes(child.out), bytes(child.err))
        finally:
            self._discard(child)

    async def ask(self, timeout_s: float) -> bytes:
        """One line of answer from the child, which is started where none runs. Raises SensorError
        when there is none in time; a late child is killed."""
        child = self._child
        if child is None or child.exited or child.discarded:
            child = await self._start(asyncio.subprocess.PIPE)
        try:
            child.write(b"\n")
            await child.until(lambda: b"\n" in child.out or child.mute, timeout_s)
            line, newline, rest = bytes(child.out).partition(b"\n")
            if not newline or rest or child.too_much:
                raise SensorError(await self._trouble(child, timeout_s))
        except BaseException:  # a cancelled question would be answered to the next one
            self._discard(child)
            raise
        child.out.clear()
        child.err.clear()  # chatter of a vendor's library
        return line

    async def _trouble(self, child: _Child, timeout_s: float) -> str:
        if not child.mute and not child.out:
            return f"{self._what} did not answer within {timeout_s:g} s; stopped it"
        if await child.until(lambda: child.exited, _LAST_WORDS_S):
            last = bytes(child.err[-200:]).decode(errors="replace").strip()
            return f"{self._what} ended: {child.end}" + (f" ({last})" if last else "")
        return f"{self._what} ended, or answered in no form of ours"

    async def stop(self) -> None:
        """Let it go, then make it; returns in time even where it cannot die."""
        child = self._child
        if child is None:
            return
        child.close_pipes(0)
        if not await child.until(lambda: child.exited, _GOODBYE_S):
            self._discard(child)
            if not await child.until(lambda: child.exited, _DIE_WITHIN_S):
                log.error("sensor_process_does_not_die", what=self._what, pid=child.pid)
        self._discard(child)
        if child.transport is not None:
            child.transport.close()

    async def _start(self, stdin: int) -> _Child:
        old = self._child
        if old is not None and not await old.until(lambda: old.exited, _LAST_WORDS_S):
            raise SensorError(
                f"{self._what}: process {old.pid} hangs in the driver and cannot be ended; "
                "waiting for it (a reboot may be needed)"
            )
        child = _Child()
        self._child = child  # from here on stop() finds it
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: child,
                *self._command,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd="/",  # `-m` imports from there first: not from wherever the daemon was started
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"} | self._environ,
            )
        except (OSError, ValueError) as error:  # ValueError: a null byte in the command
            self._child = None
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SensorError(f"cannot start {self._command[0]}: {reason}") from None
        except asyncio.CancelledError:
            if child.transport is None:  # it has been killed and reaped already
                self._child = None
            self._discard(child)
            raise
        return child

    def _discard(self, child: _Child) -> None:
        """Kill what is left of it. Its pipes are freed now, the rest when it has died."""
        if child.transport is None:
            return
        if not child.exited or not child.silent:
            self._kill(child.pid)  # a group's number is not reused while it has a member
        child.discarded = True
        child.close_pipes(0, 1, 2)
        if child.exited:
            child.transport.close()
