"""Deadline: the next frame must follow in time; the worker's own promise, and some patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LATE_FACTOR = 1.5  # of an announced deadline: the machine may be busy, the worker not hung


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
            late_s = within_s * _LATE_FACTOR
            words = f"worker hung: {what} did not end within {late_s:.1f} s"
            self._timer = asyncio.get_running_loop().call_later(late_s, self._miss, words)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _miss(self, words: str) -> None:
        self._timer = None
        self._on_missed(words)
