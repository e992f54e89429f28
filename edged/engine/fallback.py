"""Fallback: when the engine at the end of the chain is loaded, and when it gives its memory back.

It is woken by the first failure before it, parked when the others serve again and it is idle,
and yields on a board too small for both once an engine before it waits for memory. One that is to
stay loaded is parked under memory pressure only, and returns when that is long over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from edged.engine.worker_engine import WorkerEngine

log = structlog.get_logger("edged.engine")

_PAUSE_MAX_S = 4 * 3600.0  # before a warm one is tried again
_YIELD_S = 30.0  # for an engine to take the memory that was given back for it


class Fallback:
    """spare: the engine. before: those it stands in for, in order of the chain. idle_s: how long
    it stays loaded without work. lazy: it may be parked when it is idle; one that is not is parked
    for want of memory only, and loaded again after idle_s without pressure, or longer each time."""

    def __init__(
        self, spare: WorkerEngine, before: Sequence[WorkerEngine], idle_s: float, lazy: bool
    ) -> None:
        self._spare, self._before = spare, tuple(before)
        self._idle_s, self._lazy = idle_s, lazy
        # An engine before it that is not one of `before` serves all who wait.
        self.covered: Callable[[], bool] = lambda: False
        self._woken = False  # it was parked before, and may be again
        self._idle_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._calm_pause_s = 0.0  # before it is loaded again all the same
        self._starved_since_s: float | None = None  # somebody before it waits for its memory
        self._yielded: tuple[WorkerEngine, int, float] | None = None  # (to, its starts, until)
        self._given_to: WorkerEngine | None = None  # until our process is gone
        self._next_yield_s = 0.0
        self._yield_pause_s = idle_s

    # --- at every change -------------------------------------------------------------------------

    def review(self) -> None:
        """Wake it once an engine before it has failed and nobody else serves who waits."""
        if not self._spare.keeper.parked or self._yields():
            return
        if any(engine.keeper.state == "ready" for engine in self._before):
            return
        failed = [engine for engine in self._before if engine.keeper.faulted]
        if failed and not self.covered():
            self.wake(f"{failed[-1].name} failed")

    def wake(self, why: str) -> None:
        if self._spare.keeper.parked:
            log.warning("fallback_starts", engine=self._spare.name, why=why)
            self._woken, self._idle_since_s = True, None
            self._spare.closed = False
            self._spare.keeper.wake(f"starts, for {why}")

    def park(self, why: str) -> None:
        log.info("fallback_parked", engine=self._spare.name, why=why)
        self._woken, self._idle_since_s, self._starved_since_s = True, None, None
        self._calm_since_s = None
        self._calm_pause_s = max(self._idle_s, min(_PAUSE_MAX_S, 2 * self._calm_pause_s))
        self._spare.closed = False
        start_s = self._spare.keeper.start_s
        gap = "" if start_s is None else f"; streams then wait about {start_s:.0f} s for it"
        self._spare.keeper.park(f"waits until an engine before it fails ({why}){gap}")

    @property
    def idle(self) -> bool:
        """Loaded, and nobody uses it, nor waits for the guard to open it."""
        health = self._spare.health()
        return health.state == "ready" and health.admits and not health.running

    def serves_beside(self) -> bool:
        """Another engine serves too, so that this one can be missed."""
        return any(engine.keeper.state == "ready" for engine in self._before)

    # --- once a second ---------------------------------------------------------------------------

    def look(self, calm: bool) -> None:
        """calm: the machine is not short of memory."""
        now_s = asyncio.get_running_loop().time()
        if self._given_to is not None and not self._spare.keeper.alive:
            self._given_to.keeper.hurry()
            self._given_to = None
        self.review()
        if self._spare.keeper.parked:
            self._return_when_calm(now_s, calm)
            return
        self._park_when_idle(now_s)
        self._yield_when_starved(now_s)

    def _park_when_idle(self, now_s: float) -> None:
        if not (self._lazy and self._woken and self.serves_beside() and self.idle):
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= self._idle_s:
            self.park(f"it was idle for {self._idle_s:g} s")

    def _return_when_calm(self, now_s: float, calm: bool) -> None:
        """It was to stay loaded, and was parked for want of memory."""
        if self._lazy or not calm:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= self._calm_pause_s and self._spare.keeper.spares():
            self.wake(f"memory has not been short for {self._calm_pause_s:g} s")

    def _yield_when_starved(self, now_s: float) -> None:
        """An engine before it has no memory because this one has it: when idle at once, else no
        new streams after a while. Less and less often, where that does not help."""
        starved = next((e for e in self._before if e.keeper.would_fit(self._held())), None)
        if not self._lazy or starved is None or now_s < self._next_yield_s:
            self._starved_since_s = None
            if self._spare.closed:
                self._spare.closed = False
                self._spare.on_change()  # who waits may come in again
            return
        self._starved_since_s = now_s if self._starved_since_s is None else self._starved_since_s
        self._spare.closed = now_s - self._starved_since_s >= self._idle_s
        if self.idle:
            self._yielded = (starved, starved.keeper.starts, now_s + _YIELD_S)
            self._next_yield_s = now_s + self._yield_pause_s
            self._yield_pause_s *= 2
            self._given_to = starved
            starved.keeper.expect_memory(_YIELD_S, f"waits for the memory of {self._spare.name}")
            self.park(f"{starved.name} needs the memory")

    def _held(self) -> int:
        """What parking it gives back: of its caches only what was ever used."""
        keeper = self._spare.keeper
        if not keeper.alive or keeper.rung.needs is None:
            return 0
        resident = keeper.means.memory.resident_bytes(self._spare.pid or 0)
        held_bytes = keeper.rung.needs.held_bytes
        return held_bytes if resident is None else min(held_bytes, resident)

    def _yields(self) -> bool:
        """What was given back is still to be taken."""
        if self._yielded is None:
            return False
        engine, starts, until_s = self._yielded
        begun = engine.keeper.starts > starts
        if begun and engine.keeper.state == "ready":
            self._yield_pause_s = self._idle_s
        over = begun and engine.keeper.state != "starting"
        if over or (not begun and asyncio.get_running_loop().time() > until_s):
            self._yielded = None
        return self._yielded is not None
