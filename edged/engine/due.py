"""Due: when the next worker is to be started: at a time, at once, or not before somebody asks.

Starts nothing; whoever waits here does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Due:
    """at_s: loop time of the next start. parked: none until `unpark`, whatever the time."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.parked = False
        self._nudge = asyncio.Event()

    def after(self, seconds: float) -> None:
        """From now; who waits already hears of it at the next nudge."""
        self.at_s = asyncio.get_running_loop().time() + seconds

    def park(self) -> None:
        self.parked = True

    def unpark(self) -> None:
        self.parked = False
        self.nudge()

    def nudge(self) -> None:
        """Who waits looks again."""
        self._nudge.set()

    async def wait(self, on_wait: Callable[[float], None]) -> None:
        """Until it is due. on_wait hears how many seconds are left, at each look; not while
        parked."""
        loop = asyncio.get_running_loop()
        while self.parked or self.at_s > loop.time():
            timer = None
            if not self.parked:
                left_s = self.at_s - loop.time()
                on_wait(left_s)
                timer = loop.call_later(left_s, self.nudge)
            self._nudge.clear()
            try:
                await self._nudge.wait()
            finally:
                if timer is not None:
                    timer.cancel()
