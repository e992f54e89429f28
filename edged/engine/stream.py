"""Stream: what a caller holds of its request, from admission to the one Finish.

Pushed to in `def` by the scheduler, awaited by one reader; deltas coalesce when it is late.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from edged.core import Delta, EngineSpan, Finish, FinishReason, Request, Timings, Usage
from edged.engine import Link, Run, TextEngine, by_text
from edged.engine.writer import Writer
from edged.errors import EdgedError, EngineMoved, RequestError, RowFault

_MOST_RETURNS = 20  # of a stream whose engines are busy whenever it comes; then it moves on or ends


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
        self.dispatched_s: float | None = None  # the first time
        self.first_token_s: float | None = None
        self.left: dict[str, EdgedError] = {}  # engines that failed it, and how
        self.moves: EdgedError | None = None  # why it is not where it was
        self.finish: Finish | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._cancel = cancel
        self._spans: list[EngineSpan] = []
        self._returns = 0
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

    @property
    def engine(self) -> str:
        """The one that writes or wrote last; "" = none yet."""
        return self._spans[-1].name if self._spans else ""

    def suits(self, engine: Link) -> bool:
        """The engine has not failed this stream and can do all that was asked."""
        if engine.name in self.left:
            return False
        other = by_text(engine)
        return other is None or not other.unsuited(self.request, self.writer.begun)

    def run_on(self, engine: Link) -> Run:
        """From here on `engine` writes: by ids where it shares the request's tokenizer and all
        is written in such ids, else by text.

        Raises EngineFault when it is not ready, RowFault when it cannot take this stream.
        """
        if self.dispatched_s is None:
            self.dispatched_s = asyncio.get_running_loop().time()
        self._begin_span(engine)
        writer, request = self.writer, self.request
        left = request.max_tokens - writer.tokens
        if isinstance(engine, TextEngine):
            return engine.run_text(dataclasses.replace(request, max_tokens=left), writer.written)
        if writer.by_ids:
            return engine.run(request, writer.generated)
        try:
            prefix = writer.ids()
        except RequestError as error:
            raise RowFault(f"what was written so far cannot be taken over: {error}") from None
        # Another tokenizer counted what is written; what is left stays the same.
        return engine.run(dataclasses.replace(request, max_tokens=len(prefix) + left), prefix)

    def _begin_span(self, engine: Link) -> None:
        reason = self.moves.code if self.moves is not None else "first"
        self._close_span()
        at = self.writer.tokens
        words = by_text(engine) is not None or not self.writer.by_ids
        approximate = words and self.writer.begun
        self._spans.append(EngineSpan(engine.name, engine.model, at, at, reason, approximate))

    def put_back(self) -> bool:
        """The engine was busy and wrote nothing: it was never there. False = too often."""
        self._returns += 1
        if self._returns > _MOST_RETURNS or self._spans[-1].from_token != self.writer.tokens:
            return False
        self._spans.pop()
        return True

    def leave(self, fault: EdgedError) -> None:
        """The engine that writes has failed this stream, and will not get it again; or it restarts
        on purpose, and may."""
        self.moves = fault
        if not isinstance(fault, EngineMoved):
            self.left[self._spans[-1].name] = fault

    def push(self, delta: Delta) -> None:
        if self.first_token_s is None and delta.tokens:
            self.first_token_s = asyncio.get_running_loop().time()
        self._deltas.append(delta)
        self._wake()

    def end(
        self, reason: FinishReason, code: str | None = None, message: str | None = None
    ) -> None:
        if self.finish is not None:
            return
        spans = self._close_span()
        self.finish = Finish(
            reason=reason,
            usage=Usage(
                len(self.request.prompt_ids), self.writer.tokens, self.writer.cached_tokens
            ),
            engines=spans,
            timings=self._timings(),
            error_code=code,
            error_message=message,
        )
        self._wake()

    def _close_span(self) -> tuple[EngineSpan, ...]:
        """The last span ends here; an engine that wrote nothing is still named."""
        self.writer.settle()
        if self._spans:
            at = self.writer.tokens
            self._spans[-1] = dataclasses.replace(self._spans[-1], to_token=at)
        return tuple(self._spans)

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
