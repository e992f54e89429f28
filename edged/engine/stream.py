"""Stream: what a caller holds of its request, from admission to the one Finish.

Pushed to in `def` by the scheduler, awaited by one reader; deltas coalesce when it is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edged.core import Delta, EngineSpan, Finish, FinishReason, Request, Timings, Usage
from edged.engine import Engine
from edged.engine.writer import Writer


class Stream:
    """What submit returns: an async iterator of Deltas whose last event is exactly one Finish.

    aclose() cancels in queue, prefill and decode alike and may be called before the first
    iteration; use `async with contextlib.aclosing(stream)`. Never raises EngineFault: faults
    end the stream with Finish("failed", error_code=..., error_message=...).
    """

    def __init__(self, request: Request, writer: Writer, cancel: Callable[[Stream], None]) -> None:
        self.request = request
        self.writer = writer
        self.admitted_s = asyncio.get_running_loop().time()
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        self.engine: Engine | None = None
        self.finish: Finish | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._cancel = cancel
        self._deltas: list[Delta] = []
        self._finish_taken = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta | Finish:
        while not self._deltas:
            if self.finish is not None:
                if self._finish_taken:
                    raise StopAsyncIteration
                self._finish_taken = True
                return self.finish
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        return deltas[0] if len(deltas) == 1 else _merge(deltas)

    async def aclose(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the stream as `cancelled` unless it has ended already."""
        if self.finish is None:
            self._cancel(self)

    # --- used by the scheduler -------------------------------------------------------------------

    def push(self, delta: Delta) -> None:
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = asyncio.get_running_loop().time()
        self._deltas.append(delta)
        self._wake()

    def end(
        self, reason: FinishReason, code: str | None = None, message: str | None = None
    ) -> None:
        if self.finish is not None:
            return
        self.finish = Finish(
            reason=reason,
            usage=Usage(
                len(self.request.prompt_ids),
                len(self.writer.generated),
                self.writer.cached_tokens,
            ),
            engines=self._spans(),
            timings=self._timings(),
            error_code=code,
            error_message=message,
        )
        self._wake()

    def _spans(self) -> tuple[EngineSpan, ...]:
        if self.engine is None:
            return ()
        return (EngineSpan(self.engine.name, self.engine.model, 0, len(self.writer.generated)),)

    def _timings(self) -> Timings:
        def since(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - self.admitted_s

        now_s = asyncio.get_running_loop().time()
        return Timings(since(self.dispatched_s), since(self.first_token_s), now_s - self.admitted_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join(d.text for d in deltas),
        tuple(i for d in deltas for i in d.token_ids),
        tuple(p for d in deltas for p in d.logprobs),
    )
