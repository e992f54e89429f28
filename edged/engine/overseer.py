"""Overseer: looks after all engines of the chain once a second, and at every change.

Ticks their ladders, makes them step down before the kernel kills for memory, and keeps the
fallback in mind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from edged.engine.fallback import Fallback
from edged.engine.worker_engine import WorkerEngine
from edged.memory import Memory, pressed

log = structlog.get_logger("edged.engine")

_EVERY_S = 1.0
# The fallback heats the same die; and what restarts on purpose is soon back, unless the memory it
# needs for that is taken.
_NO_HELP = ("thermal_shutdown", "engine_moved")
_LOOKS = 2  # in a row that must find pressure: one may be a moment


@dataclass(frozen=True)
class Watch:
    """What counts as pressure: available memory below the floor, or tasks that waited for memory
    that share of the last 10 s."""

    floor_bytes: int
    some_percent: float
    full_percent: float


class Overseer:
    """engines: of the chain, in order."""

    def __init__(
        self,
        engines: Sequence[WorkerEngine],
        fallback: Fallback | None,
        memory: Memory,
        watch: Watch,
    ) -> None:
        self._engines, self._fallback = tuple(engines), fallback
        self._memory, self._watch = memory, watch
        self.covered: Callable[[], bool] = lambda: False  # all who wait are served all the same
        if fallback is not None:
            fallback.covered = lambda: self.covered()
        self.on_wedged: Callable[[str], None] = lambda words: None  # again and again
        self._pressed = 0  # looks in a row
        self.looked_s: float | None = None  # loop time of the last look

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self.looked_s = asyncio.get_running_loop().time()
            try:
                self.look()
            except Exception:  # a bug of ours must not end the watch; the next look is a new one
                log.exception("overseer_failed")

    def look(self) -> None:
        """Once a second."""
        watch = self._watch
        words = pressed(self._memory, watch.floor_bytes, watch.some_percent, watch.full_percent)
        for engine in self._engines:
            engine.keeper.tick(calm=not words)
            if engine.keeper.wedged:
                self.on_wedged(f"{engine.name}: {engine.keeper.wedged}")
        self._pressed = self._pressed + 1 if words else 0
        if self._pressed >= _LOOKS:
            self._relieve(words)
        if self._fallback is not None:
            self._fallback.look(calm=not words)

    def review(self) -> None:
        """Something changed."""
        if self._fallback is not None:
            self._fallback.review()

    def need(self, code: str) -> None:
        """A stream has lost its engine, for a code of the error table, and looks for another."""
        if self._fallback is not None and code not in _NO_HELP and not self.covered():
            self._fallback.wake("a stream that looks for another engine")

    def _relieve(self, words: str) -> None:
        """Give memory back before the kernel takes it: first what nobody uses."""
        fallback = self._fallback
        if fallback is not None and fallback.idle and fallback.serves_beside():
            self._pressed = 0
            fallback.park(words)
            return
        for engine in self._engines:
            if engine.keeper.state == "ready":
                engine.press(words)
                return
