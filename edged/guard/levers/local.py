"""A knob the daemon's own user may turn: a vendor's clock commands, as a lever.

Blocking calls run in a thread with time-outs of their own. What was there before is kept in a
file and restored at the next start should the daemon be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from edged.guard.levers import Kind, LeverError
from edged.guard.levers.knobs import Knob, clamped, move
from edged.guard.levers.saved import Saved


class LocalLever:
    """hold() first: one process at a time. Close with stop()."""

    def __init__(self, knob: Knob, saved: Saved) -> None:
        self.name: str = knob.name
        self.kind: Kind = knob.kind
        self.values: tuple[float, ...] = knob.values
        self._knob, self._saved = knob, saved
        self._turn = threading.Lock()  # of threads: a cancelled wait leaves its thread at work

    async def hold(self) -> None:
        """Take the levers, and undo what a killed daemon left. Raises LeverError."""
        self._saved.hold()
        try:
            await self.restore()
        except LeverError:
            self._saved.release()
            raise

    async def set(self, value: float) -> float:
        return await asyncio.to_thread(self._set, value)

    async def restore(self) -> None:
        problems = await asyncio.to_thread(self._restore)
        if problems:
            raise LeverError("; ".join(problems))

    async def stop(self) -> None:
        with contextlib.suppress(LeverError):  # stays in the file for the next start
            await self.restore()
        self._saved.release()

    def _set(self, value: float) -> float:
        with self._turn:
            wanted = clamped(self.kind, self.values, value)
            self._saved.keep(self._knob)
            return move(self._knob, wanted)

    def _restore(self) -> list[str]:
        with self._turn:
            return self._saved.restore({self.name: self._knob})
