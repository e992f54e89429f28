"""Life: one worker, from exec to its end: what it says, by when it must, and why it died.

Knows nothing of streams or rungs; a new one is made for every start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from edged import wire
from edged.engine.causes import cause_of, cause_of_exit
from edged.engine.child import WORKER, Child
from edged.engine.deadline import Deadline
from edged.engine.device_lock import DeviceHeld, DeviceLock, WorkerStuck
from edged.errors import EngineFault
from edged.ladder import Cause
from edged.memory import Memory

log = structlog.get_logger("edged.engine")

_HELLO_WITHIN_S = 60.0  # interpreter start and imports on a slow board (assumed)


@dataclass(frozen=True)
class Means:
    """What a worker is started with. threads: asked at each start, 0 = as launched."""

    command: tuple[str, ...] = WORKER
    environ: Mapping[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    lock: DeviceLock | None = None
    threads: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Hears:
    """Who listens. on_idle: it promised nothing for now, but may not have read all it was sent.
    on_end: (cause, words) of a worker that was not let go; once, the last call."""

    on_report: Callable[[wire.Report], None]
    on_ready: Callable[[wire.Ready], None]
    on_tested: Callable[[wire.SelfTested], None]
    on_idle: Callable[[], None]
    on_end: Callable[[Cause, str], None]


class Life:
    def __init__(self, name: str, launch: wire.Launch, means: Means, hears: Hears) -> None:
        self.deadline = Deadline(lambda words: self.fail("hang", words))
        self.last_progress_s: float | None = None
        self._name, self._launch, self._means, self._hears = name, launch, means, hears
        self._child = Child(self._on_message, self._on_gone, means.command, means.environ)
        self._heard = True
        self._ready = False
        self._over = asyncio.Event()
        self._cause: tuple[Cause, str] | None = None  # where it is known before the exit
        self._oom_kills = means.memory.oom_kills()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def undead(self) -> bool:
        """Even SIGKILL has not ended it."""
        return self._child.undead

    async def run(self) -> None:
        """Until the process is reaped, or cannot be."""
        self.deadline.expect(_HELLO_WITHIN_S, "say hello")
        try:
            await self._exec()
        except WorkerStuck as fault:
            self._cause = ("wedged", str(fault))
            self._on_gone("not started")
        except DeviceHeld as fault:
            self._cause = ("held", str(fault))
            self._on_gone("not started")
        except EngineFault as fault:
            self._on_gone(str(fault))
        await self._over.wait()
        await self._child.stop()  # reap it, and drain its last words into the log

    async def stop(self) -> None:
        """End it now: one that loads hears nothing, and has nothing to lose."""
        self.let_go()
        await (self._child.stop() if self._ready else self._child.stop(grace_s=0))

    def let_go(self) -> None:
        """It is not wanted any more, and nothing it says is heard; `run` ends it."""
        self._heard = False
        self.deadline.cancel()
        self._over.set()

    def send(self, message: wire.ToWorker) -> None:
        self._child.send(message)

    def fail(self, cause: Cause, words: str) -> None:
        """It is as good as dead: kill it."""
        if self._heard:
            self._cause = (cause, words)
            self._child.fail("killed")

    async def _exec(self) -> None:
        lock = self._means.lock
        file = None if lock is None else await lock.claim()
        if lock is None or file is None:
            await self._child.start(self._name)
            return
        try:
            await self._child.start(self._name, (file,))
            lock.record(file, self._child.pid or 0)
        finally:
            os.close(file)  # from here on the worker alone holds it

    # --- what is heard of it ---------------------------------------------------------------------

    def _on_message(self, message: wire.ToDaemon) -> None:
        if not self._heard:
            return
        self.last_progress_s = asyncio.get_running_loop().time()
        if isinstance(message, wire.Report):
            self.deadline.expect(message.deadline_s, "step")
            self._hears.on_report(message)
        elif isinstance(message, wire.Phase):
            self.deadline.expect(message.deadline_s, message.name)
            if not self.deadline.pending:
                self._hears.on_idle()
        elif isinstance(message, wire.Hello):
            self._on_hello(message)
        elif isinstance(message, wire.Ready):
            self.deadline.cancel()
            self._ready = True
            self._hears.on_ready(message)
        elif isinstance(message, wire.SelfTested):
            self._hears.on_tested(message)
        else:
            self._cause = (cause_of(message), f"{message.kind}: {message.detail}")
            log.error("engine_fault", engine=self._name, kind=message.kind, detail=message.detail)

    def _on_hello(self, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            words = f"worker speaks wire version {hello.version}, not {wire.VERSION}"
            self.fail("internal", words)
            return
        threads = self._means.threads() or self._launch.threads
        self.send(msgspec.structs.replace(self._launch, threads=threads))

    def _on_gone(self, exit_words: str) -> None:
        """The process is dead, or given up."""
        if self._heard:
            self._heard = False
            self.deadline.cancel()
            if self._cause is None:
                kills = self._means.memory.oom_kills()
                self._cause = (cause_of_exit(exit_words, self._oom_kills, kills), "")
            cause, known = self._cause
            self._hears.on_end(cause, f"{known} ({exit_words})" if known else exit_words)
        self._over.set()
