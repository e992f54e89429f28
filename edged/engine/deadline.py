"""Deadline: the next frame must follow in time; the worker's own promise, and some patience.

Nobody is blamed for time in which we did not run ourselves: a machine that was suspended, a
process that was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LATE_FACTOR = 1.5  # of an announced deadline: the machine may be busy, the worker not hung
_ASLEEP_S = 1.0  # a timer that fires later than that tells of us, not of the worker


class Deadline:
    """on_missed gets the cause in words."""

    def __init__(self, on_missed: Callable[[str], None]) -> None:
        self._on_missed = on_missed
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        return self._timer is not None

    @property
    def due_s(self) -> float | None:
        """Loop time at which it is missed."""
        return None if self._timer is None else self._timer.when()

    def expect(self, within_s: float, what: str) -> None:
        """The next frame must follow within `within_s` (0 = no promise)."""
        self.cancel()
        if within_s > 0:
            self._arm(within_s * _LATE_FACTOR, what)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, late_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(late_s, self._miss, loop.time() + late_s, late_s, what)

    def _miss(self, due_s: float, late_s: float, what: str) -> None:
        """A frame may be waiting unread when we wake up, and a worker that was asleep as well
        needs its time again."""
        self._timer = None
        if asyncio.get_running_loop().time() - due_s > _ASLEEP_S:
            self._arm(late_s, what)
            return
        self._on_missed(f"worker hung: {what} did not end within {late_s:.1f} s")
