"""Overseer: looks after all engines of the chain once a second, and at every change.

Ticks their ladders, steps down before the kernel kills for memory, and starts the fallback when
it is needed and ends it when it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from edged.engine.worker_engine import WorkerEngine
from edged.memory import Memory, pressed

log = structlog.get_logger("edged.engine")

_EVERY_S = 1.0
_LOOKS = 2  # in a row that must find pressure: one may be a moment


@dataclass(frozen=True)
class Watch:
    """floor_bytes: of available memory. some/full_percent: of the last 10 s. idle_s: how long a
    fallback without work stays loaded; lazy: it may be ended at all."""

    floor_bytes: int
    some_percent: float
    full_percent: float
    idle_s: float
    lazy: bool


class Overseer:
    """engines: of the chain, in order. spare: the one to fall back to, if it may be parked."""

    def __init__(
        self,
        engines: Sequence[WorkerEngine],
        spare: WorkerEngine | None,
        memory: Memory,
        watch: Watch,
    ) -> None:
        self._engines, self._spare = tuple(engines), spare
        self._memory, self._watch = memory, watch
        self._pressed = 0  # looks in a row
        self._idle_since_s: float | None = None
        self._woken = False  # the spare was parked before, and may be again

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.look()
            except Exception:  # a bug of ours must not end the watch; the next look is a new one
                log.exception("overseer_failed")

    def look(self) -> None:
        """Once a second."""
        for engine in self._engines:
            engine.keeper.tick()
        words = pressed(
            self._memory,
            self._watch.floor_bytes,
            self._watch.some_percent,
            self._watch.full_percent,
        )
        self._pressed = self._pressed + 1 if words else 0
        if self._pressed >= _LOOKS:
            self._relieve(words)
        self.review()
        self._park_when_idle()

    def review(self) -> None:
        """Something changed: the spare is woken once an engine before it has failed."""
        spare = self._spare
        if spare is None or not spare.keeper.parked:
            return
        before = self._engines[: self._engines.index(spare)]
        if not any(engine.keeper.state == "ready" for engine in before):
            failed = [engine for engine in before if engine.keeper.faulted]
            if failed:
                self._wake(f"{failed[-1].name} failed")

    def need(self, code: str) -> None:
        """A stream has lost its engine, for a code of the error table, and looks for another."""
        if code != "thermal_shutdown":  # the CPU would heat the same die
            self._wake("a stream looks for another engine")

    def _wake(self, why: str) -> None:
        if self._spare is not None and self._spare.keeper.parked:
            log.warning("fallback_starts", engine=self._spare.name, why=why)
            self._woken, self._idle_since_s = True, None
            self._spare.keeper.wake(f"starts, for {why}")

    def _relieve(self, words: str) -> None:
        """Give memory back before the kernel takes it: first what nobody uses."""
        spare = self._spare
        ready = [engine for engine in self._engines if engine.keeper.state == "ready"]
        if spare is not None and spare in ready[1:] and not spare.health().running:
            self._pressed, self._woken = 0, True
            log.warning("fallback_parked", engine=spare.name, why=words)
            spare.keeper.park(f"waits until another engine fails: {words}")
        elif ready:
            ready[0].press(words)

    def _park_when_idle(self) -> None:
        spare = self._spare
        if spare is None or not (self._watch.lazy and self._woken) or spare.keeper.parked:
            return
        before = self._engines[: self._engines.index(spare)]
        served = any(engine.keeper.state == "ready" for engine in before)
        now_s = asyncio.get_running_loop().time()
        if not served or spare.health().running:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= self._watch.idle_s:
            self._idle_since_s = None
            log.info("fallback_parked", engine=spare.name, why="idle")
            spare.keeper.park(
                f"waits until another engine fails: idle for {self._watch.idle_s:g} s"
            )
