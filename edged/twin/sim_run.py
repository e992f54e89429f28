"""What a simulated engine is made of: one stream, its memory, and the account of the work.

No time, no physics: sim_engine.py has those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edged.core import Request, Step
from edged.errors import EngineFault


class Allocator(Protocol):
    """Where a stream's KV memory comes from: an arena of slots or the device, each time."""

    def free_streams(self) -> int:
        """How many more streams fit now."""

    def take(self) -> object:
        """Raises EngineFault when there is no room."""

    def give(self, taken: object) -> None: ...


@dataclass
class Work:
    """What the engine has done since it began; a guard looks at the differences.

    busy_s counts the running step up to now; jitter_s: how much longer all steps and pauses
    took than the bare model, which is what spread figures leave out.
    """

    decode_steps: int = 0
    decode_rows: int = 0
    decode_busy_s: float = 0.0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_busy_s: float = 0.0
    tokens: int = 0
    jitter_s: float = 0.0


class SimRun:
    """One stream; see edged.engine.Run."""

    def __init__(
        self,
        request: Request,
        prefix: int,
        taken: object,
        jitter_z: float,
        on_close: Callable[[], None],
    ) -> None:
        self.remaining = len(request.prompt_ids) + prefix
        self.rows = 0
        self.made = 0
        self.wanted = request.max_tokens - prefix
        self.served = 0
        self.order = 0
        self.taken = taken
        self.jitter_z = jitter_z  # how slow this request's steps are, in standard deviations
        self.closed = False
        self._on_close = on_close
        self._steps: list[Step] = []
        self._fault: EngineFault | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> SimRun:
        return self

    async def __anext__(self) -> Step:
        while not self._steps:
            if self._fault is not None:
                raise self._fault
            if self.closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._steps.pop(0)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close()
            self._wake()

    def give(self, step: Step) -> None:
        self._steps.append(step)
        self._wake()

    def fail(self, fault: EngineFault) -> None:
        self._fault = fault
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
