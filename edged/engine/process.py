"""WorkerProcess: the operating system's side of a worker: exec, output, end, kill.

The worker leads a session of its own; what it started is killed with it. Its end is told when
the process ends, not when the last holder of its output pipe does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

import structlog

from edged.engine.output import OutputLog

log = structlog.get_logger("edged.worker")

_DIE_WITHIN_S = 5.0  # a killed process; one that hangs in its driver never dies
_LAST_WORDS_S = 1.0  # for its output after its end


class WorkerProcess(asyncio.SubprocessProtocol):
    """on_exit is called once, when the process is reaped."""

    def __init__(self, engine: str, on_exit: Callable[[], None]) -> None:
        self.exited = asyncio.Event()
        self.undead = False  # killed, and yet not ended
        self._silent = asyncio.Event()
        self._on_exit = on_exit
        self._transport: asyncio.SubprocessTransport | None = None
        self._output = OutputLog(
            lambda line: log.info("worker_output", engine=engine, pid=self.pid, line=line),
            lambda lines: log.warning("worker_output_dropped", engine=engine, lines=lines),
        )

    async def exec(
        self, command: Sequence[str], inherited: Sequence[int], environ: Mapping[str, str]
    ) -> None:
        """Start it with these open files, and `environ` on top of our own. Raises OSError."""
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,  # vendor libraries chatter there
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=inherited,
            cwd="/",  # `-m` imports from there first: not from wherever the daemon was started
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"} | dict(environ),
        )

    @property
    def pid(self) -> int:
        """0 before it has begun."""
        return self._transport.get_pid() if self._transport is not None else 0

    @property
    def cause(self) -> str:
        """How it ended, in words."""
        code = self._transport.get_returncode() if self._transport is not None else None
        return "did not end" if code is None else describe_exit(code)

    def kill(self) -> None:
        """SIGKILL at once: a hung device call cannot be interrupted otherwise."""
        if not self.exited.is_set():
            self._kill_group()

    async def end(self, grace_s: float) -> None:
        """Wait for its end, after grace_s kill it; returns when it is reaped, or cannot be."""
        if not await _within(self.exited, grace_s):
            self.kill()
            if not await _within(self.exited, _DIE_WITHIN_S):
                self.undead = True
                log.error("worker_does_not_die", pid=self.pid)
        await _within(self._silent, _LAST_WORDS_S)
        if self._transport is not None:
            self._transport.close()

    # asyncio.SubprocessProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._output.feed(data, asyncio.get_running_loop().time())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._output.end(asyncio.get_running_loop().time())
        self._silent.set()

    def process_exited(self) -> None:
        self.exited.set()
        self._kill_group()  # what it started, where any of that is left
        self._on_exit()

    def _kill_group(self) -> None:
        # A group's number is not given to another process while the group has a member.
        if self.pid > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    if not event.is_set():  # else Python 3.10's wait_for would swallow a cancellation here
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def describe_exit(code: int) -> str:
    """In words: "killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
