"""WorkerRun: one stream on a worker; buffers what the wire brings until it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edged import wire
from edged.core import Step, TokenLogprob
from edged.errors import EdgedError, RowFault


class WorkerRun:
    """Async iterator of Steps (see edged.engine.Run). Fed in `def`, awaited by one reader."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._steps: list[Step] = []
        self._fault: EdgedError | None = None
        self._ended = False  # the worker's last row or a fault has arrived
        self.closed_s: float | None = None  # cancelled since
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, row: wire.Row) -> None:
        if self._ended:
            return
        finish = row.finish
        if finish == "row_fault":
            self.fail(RowFault(row.detail))
            return
        if row.ids or finish in ("stop", "length") or row.cached_tokens >= 0:
            self._steps.append(_step(row))
        self._ended = bool(finish)
        self._wake()

    def fail(self, fault: EdgedError) -> None:
        if not self._ended:
            self._ended = True
            self._fault = fault
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> WorkerRun:
        return self

    async def __anext__(self) -> Step:
        while not self._steps:
            if self._fault is not None:
                raise self._fault
            if self._ended or self.closed_s is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        steps, self._steps = self._steps, []
        return steps[0] if len(steps) == 1 else _merge(steps)

    def close(self) -> None:
        if self.closed_s is None:
            self.closed_s = asyncio.get_running_loop().time()
            if not self._ended:
                self._cancel()
            self._wake()


def _step(row: wire.Row) -> Step:
    return Step(
        token_ids=tuple(row.ids),
        logprobs=tuple(
            TokenLogprob(token_id, chosen, tuple((i, lp) for i, lp in top))
            for token_id, (chosen, top) in zip(row.ids, row.logprobs, strict=False)
        ),
        finish=row.finish if row.finish in ("stop", "length") else None,  # type: ignore[arg-type]
        cached_tokens=row.cached_tokens if row.cached_tokens >= 0 else None,
    )


def _merge(steps: list[Step]) -> Step:
    """Deltas coalesce: a reader that was late gets one Step for several."""
    cached = [s.cached_tokens for s in steps if s.cached_tokens is not None]
    return Step(
        token_ids=tuple(i for s in steps for i in s.token_ids),
        logprobs=tuple(p for s in steps for p in s.logprobs),
        finish=steps[-1].finish,
        cached_tokens=cached[0] if cached else None,
    )
