"""Admission, queue and dispatch: `submit` is the only way in, for HTTP and MQTT alike.

Every stream ends with exactly one Finish. State changes in plain `def`; one task per running
stream drains its engine, so a slow reader never holds a slot longer than its tokens last.
Time is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog

from edged.core import Finish, FinishReason, Request
from edged.engine import Link, Run, by_text
from edged.engine.stream import Stream
from edged.engine.writer import Writer
from edged.errors import EngineBusy, EngineFault, RequestError, RowFault
from edged.queue import Queue, Waiting
from edged.text.model import TextModel

__all__ = ["Load", "Scheduler", "Stream"]

log = structlog.get_logger("edged.scheduler")


@dataclass(frozen=True)
class Running:
    """What writes a stream, and the task that drains it."""

    run: Run
    task: asyncio.Task[None]
    engine: Link


@dataclass(frozen=True)
class Load:
    """What status, metrics and readiness want to know. moved: times a stream has gone on with
    another engine, ever."""

    waiting: int
    running: int
    oldest_wait_s: float
    draining: bool
    moved: int = 0

    @property
    def live(self) -> int:
        """Streams that have not ended: in an engine, in the queue, or on their way between two."""
        return self.waiting + self.running


class Scheduler:
    """Bounded queue in front of an ordered chain of engines."""

    def __init__(
        self,
        engines: Sequence[Link],
        texts: Mapping[str, TextModel],
        queue: Queue[Stream],
        on_finish: Callable[[Request, Finish], None] = lambda request, finish: None,
        on_refuse: Callable[[Request, str], None] = lambda request, code: None,
        on_leave: Callable[[str], None] = lambda code: None,
        on_move: Callable[[str, str, str], None] = lambda source, target, reason: None,
    ) -> None:
        """on_leave: an engine has lost a stream, or none can serve it, for this code; on_move:
        (from, to, reason) the stream has found another."""
        self._engines = engines
        self._texts = texts
        self._queue = queue
        self._on_finish = on_finish
        self._on_refuse = on_refuse
        self._on_leave = on_leave
        self._on_move = on_move
        self._streams: dict[Stream, Running | None] = {}  # None = waiting
        self._ever_ready = False
        self._draining = False
        self._moved = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._service_s = 1.0  # moving mean of dispatch -> end, for Retry-After

    def submit(self, request: Request) -> Stream:
        """Admit or refuse before the first byte; a refusal is a RequestError, raised at once.

        1. draining -> shutting_down  2. no engine can serve soon -> model_loading,
        engine_unavailable or thermal_shutdown, or can do what is asked -> unsupported_parameter
        3. queue full, by requests or tokens -> queue_full  4. deadline already past ->
        deadline_exceeded
        5. queued; dispatched at once if a slot is free.
        """
        now_s = asyncio.get_running_loop().time()
        refusal = self._refusal(request, now_s)
        if refusal is not None:
            self._on_refuse(request, refusal.code)
            raise refusal
        writer = Writer(request, self._texts[request.model])
        stream = Stream(request, writer, self._cancel)
        self._streams[stream] = None
        self._idle.clear()
        self._queue.push(Waiting(request, now_s, stream))
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            stream.expiry = loop.call_at(request.deadline_s, self._expire, stream)
        self.dispatch()
        return stream

    def _refusal(self, request: Request, now_s: float) -> RequestError | None:
        if self._draining:  # 1
            return RequestError("shutting_down", "the node is shutting down", retry_after_s=5)
        healths = [engine.health() for engine in self._engines]
        states = {health.state for health in healths}
        best = "ready" if "ready" in states else "starting"
        self._ever_ready = self._ever_ready or best == "ready"
        if "ready" not in states:  # 2
            if "starting" in states and not self._ever_ready:
                return RequestError("model_loading", "the model is loading", retry_after_s=5)
            if "starting" not in states and "failed" not in states:
                detail = "; ".join(f"{e.name}: {e.health().detail}" for e in self._engines)
                message = f"no engine can serve now ({detail})"
                return RequestError("engine_unavailable", message, retry_after_s=10)
        if best in states and not any(h.admits for h in healths if h.state == best):
            message = "the chip is too hot to serve; ask again when it has cooled down"
            return RequestError("thermal_shutdown", message, retry_after_s=60)
        lacks = [unsuited(engine, request) for engine in self._engines]
        if all(lacks):
            message = f"{lacks[0]}: no engine of this node can do that; leave it out"
            return RequestError("unsupported_parameter", message, lacks[0])
        if not self._queue.has_room(request):  # 3
            message = f"{len(self._queue)} requests are waiting; the queue is full"
            return RequestError("queue_full", message, retry_after_s=self._retry_after_s())
        if request.deadline_s is not None and request.deadline_s <= now_s:  # 4
            return RequestError("deadline_exceeded", "the deadline has already passed")
        return None

    def _retry_after_s(self) -> float:
        """When a place in the queue is likely: the mean service time, shared by the slots."""
        slots = max(1, sum(engine.health().slots for engine in self._engines))
        return min(60.0, max(1.0, self._service_s * len(self._queue) / slots / 2))

    def dispatch(self) -> None:
        """Start waiting streams while there is room. Called on every change.

        New streams go to the first ready engine of the chain that suits them only; one that an
        engine failed goes first, to any ready engine that did not.
        """
        healths = [(engine, engine.health()) for engine in self._engines]
        ready = [engine for engine, now in healths if now.state == "ready" and now.admits]
        for engine in ready:
            self._fill(engine, ready)
        for stream in self._waiting():
            if not self._may_wait(stream) and not self._wakes(stream):
                self._give_up(stream)

    def _fill(self, engine: Link, ready: Sequence[Link]) -> None:
        newcomers = engine.health().newcomers

        def suits(stream: Stream) -> bool:
            if not stream.suits(engine):
                return False
            if stream.moves is not None:
                return True
            return newcomers and engine is next(filter(stream.suits, ready))

        while self._queue and engine.capacity() > 0:
            running = [s.request.client for s, r in self._streams.items() if r is not None]
            now_s = asyncio.get_running_loop().time()
            waiting = self._queue.pop(now_s, running, suits)
            if waiting is None:
                return
            self._start(waiting.item, engine)

    def _start(self, stream: Stream, engine: Link) -> None:
        source, moves = stream.engine, stream.moves
        try:
            run = stream.run_on(engine)
        except (RowFault, EngineFault) as fault:
            self._requeue(stream, fault)  # dispatch, which called us, goes on to the next engine
            return
        if moves is not None:
            self._moved += 1
            self._on_move(source, engine.name, moves.code)
        task = asyncio.create_task(self._drive(stream, run))
        self._streams[stream] = Running(run, task, engine)

    def _requeue(self, stream: Stream, fault: RowFault | EngineFault) -> None:
        """The stream goes on where it was, on another engine; with none left it ends here."""
        if not (isinstance(fault, EngineBusy) and stream.put_back()):
            stream.leave(fault)
        self._streams[stream] = None
        self._on_leave(fault.code)
        if not self._may_wait(stream):
            self._give_up(stream)
            return
        log.warning("stream_moves", request_id=stream.request.id, code=fault.code, why=str(fault))
        now_s = asyncio.get_running_loop().time()
        self._queue.push(Waiting(stream.request, now_s, stream, first=True))

    def evict(self, engines: Collection[str], fault: EngineFault) -> None:
        """Take every stream off these engines for good, and let none wait for them: it goes on
        with another or ends failed."""
        for stream, running in list(self._streams.items()):
            if running is None:
                stream.left.update(dict.fromkeys(engines, fault))  # dispatch ends it if need be
                continue
            if stream.engine not in engines:
                continue
            running.task.cancel()
            running.run.close()
            stream.left.update(dict.fromkeys(engines, fault))
            self._requeue(stream, fault)
        self.dispatch()

    def _may_wait(self, stream: Stream) -> bool:
        """Some engine that suits it serves now or is about to."""
        return any(
            engine.health().state != "off" and stream.suits(engine) for engine in self._engines
        )

    def _wakes(self, stream: Stream) -> bool:
        """An engine in standby that suits it has been called, and comes."""
        if any(e.health().standby and stream.suits(e) for e in self._engines):
            self._on_leave("engine_unavailable" if stream.moves is None else stream.moves.code)
        return self._may_wait(stream)

    def covered(self, name: str) -> bool:
        """An engine before this one in the chain is ready, one for each stream that waits."""
        before = itertools.takewhile(lambda engine: engine.name != name, self._engines)
        healths = [(engine, engine.health()) for engine in before]
        ready = [engine for engine, now in healths if now.state == "ready" and now.admits]
        return bool(ready) and all(any(map(s.suits, ready)) for s in self._waiting())

    def _give_up(self, stream: Stream) -> None:
        if stream.left:
            fault = list(stream.left.values())[-1]
            self._end(stream, "failed", fault.code, str(fault))
        else:
            self._end(stream, "failed", "engine_unavailable", "no engine can serve now")

    def _waiting(self) -> list[Stream]:
        return [stream for stream, running in self._streams.items() if running is None]

    async def _drive(self, stream: Stream, run: Run) -> None:
        """Drain one run into its stream until either ends."""
        try:
            async for step in run:
                if (delta := stream.writer.feed(step)) is not None:
                    stream.push(delta)
                if stream.writer.finish is not None:
                    break
            reason = stream.writer.finish
            if reason is not None:
                self._end(stream, reason)
            else:
                self._end(stream, "failed", "engine_fault", "the engine ended without a finish")
        except (RowFault, EngineFault) as fault:
            if stream.finish is None:
                self._requeue(stream, fault)
                self.dispatch()
        except Exception:  # a bug of ours: this stream ends, the daemon lives, the log tells
            log.exception("stream_crashed", request_id=stream.request.id)
            self._end(stream, "failed", "internal_error", "internal error; see the node's log")
        finally:
            run.close()

    def _end(
        self, stream: Stream, reason: FinishReason, code: str | None = None, why: str | None = None
    ) -> None:
        """The one place where a stream ends."""
        if stream.finish is not None:
            return
        stream.end(reason, code, why)
        if stream.expiry is not None:
            stream.expiry.cancel()
        running = self._streams.pop(stream)
        if running is None:
            self._queue.discard(stream)
        else:
            running.run.close()  # here, not only in the task: it may not have begun yet
            if running.task is not asyncio.current_task():
                running.task.cancel()
        if stream.dispatched_s is not None and reason in ("stop", "length"):
            took_s = asyncio.get_running_loop().time() - stream.dispatched_s
            self._service_s += 0.2 * (took_s - self._service_s)
        if not self._streams:
            self._idle.set()
        assert stream.finish is not None
        self._on_finish(stream.request, stream.finish)

    def _cancel(self, stream: Stream) -> None:
        self._end(stream, "cancelled", "cancelled", "the request was cancelled")

    def _expire(self, stream: Stream) -> None:
        self._end(stream, "shed", "deadline_exceeded", "the request's deadline has passed")

    @property
    def streams(self) -> Mapping[Stream, Running | None]:
        """Every live stream, and what writes it; None = it waits. To look at, not to keep."""
        return self._streams

    # --- stop ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests and shed the waiting ones; running streams go on."""
        self._draining = True
        for stream in self._waiting():
            if stream.dispatched_s is None:  # one that moves between engines has begun
                self._end(stream, "shed", "shutting_down", "the node is shutting down; ask again")

    def shed_all(self, code: str = "shutting_down") -> None:
        """End everything that still runs."""
        for stream in list(self._streams):
            self._end(stream, "shed", code, "the node stopped before the answer was complete")

    async def idle(self, within_s: float) -> bool:
        """Wait until no stream is left, at most within_s; True if none is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_s)
        return not self._streams

    def load(self) -> Load:
        now_s = asyncio.get_running_loop().time()
        return Load(
            waiting=len(self._queue),
            running=len(self._streams) - len(self._queue),
            oldest_wait_s=self._queue.oldest_wait_s(now_s),
            draining=self._draining,
            moved=self._moved,
        )


def unsuited(engine: Link, request: Request) -> str:
    """The parameter of a new request that the engine cannot do, "" if it can do all."""
    other = by_text(engine)
    return other.unsuited(request, False) if other is not None else ""
