"""Chunks: pieces of text gathered so that a stream costs few messages per second.

The first piece goes at once, the next ones when the interval has passed. Emits through a
callback, in plain `def`; nothing is lost: flush() empties it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Chunks:
    def __init__(self, interval_s: float, emit: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._emit = emit
        self._pieces: list[str] = []
        self._next_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._loop.time() >= self._next_s:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._next_s, self.flush)

    def flush(self) -> None:
        """Emit what has gathered, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
            self._next_s = self._loop.time() + self._interval_s
            self._emit(text)
