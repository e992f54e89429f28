"""AuditFacts: what the self-audit looks at, collected from the parts; changes nothing.

Also lists what has been begun and must end (load, step, start, hand-over, deadline of a request),
who is to act on it, and by when.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edged import census
from edged.audit import EngineFacts, Facts, Held, Obligation, StreamFacts
from edged.engine import Link, Run
from edged.engine.foreign import ForeignRun
from edged.engine.overseer import Overseer
from edged.engine.run import WorkerRun
from edged.engine.upstream import UpstreamEngine
from edged.engine.worker_engine import WorkerEngine
from edged.scheduler import Running, Scheduler, Stream

_LOOK_S = 5.0  # for the overseer, who looks each second
_ROUND_S = 120.0  # for the guard: its period is a minute at most, its sensors may be slow
_WRITER = "Sse._ping"  # one for each stream of server-sent events


@dataclass(frozen=True)
class Sources:
    """Where the facts are. links: the chain as the scheduler sees it; connections, jobs: open
    HTTP connections, MQTT requests in flight; guarded_s: when the guard's last round began."""

    scheduler: Scheduler
    links: Sequence[Link]
    workers: Sequence[WorkerEngine]
    upstream: UpstreamEngine | None
    overseer: Overseer | None
    connections: Callable[[], int]
    jobs: Callable[[], int]
    guarded_s: Callable[[], float | None] = lambda: None


def collect(sources: Sources, now_s: float) -> Facts:
    streams = sources.scheduler.streams
    written = {
        id(run): stream
        for stream, running in streams.items()
        if running is not None and (run := inner(running.run)) is not None
    }
    engines = [_worker(engine, written) for engine in sources.workers]
    if (upstream := sources.upstream) is not None:
        held = _held(upstream.held(), written)
        engines.append(EngineFacts(upstream.name, upstream.health().slots, held))
    known = frozenset(engine.pid for engine in engines if engine.pid is not None)
    tasks = Counter(_name(task) for task in asyncio.all_tasks())
    return Facts(
        now_s=now_s,
        streams=_streams(sources, streams),
        queued=sources.scheduler.load().waiting,
        engines=engines,
        connections=sources.connections(),
        jobs=sources.jobs(),
        tasks=tasks,
        writers=tasks[_WRITER],
        children=census.children(known),
        strays=sum(bool(engine.keeper.wedged) for engine in sources.workers),
        obligations=tuple(obligations(sources, now_s)),
    )


def accounted_files(facts: Facts, upstream: UpstreamEngine | None) -> int:
    """Open files that are somebody's: a socket each; socket, pipe and pidfd of a child."""
    kept_alive = 0 if upstream is None else upstream.health().slots
    return facts.connections + 4 * len(facts.children or ()) + kept_alive


def inner(run: Run) -> Run | None:
    """What the engine itself knows of; None while a run is prepared."""
    return run.inner if isinstance(run, ForeignRun) else run


# --- streams and slots ----------------------------------------------------------------------------


def _streams(sources: Sources, streams: Mapping[Stream, Running | None]) -> list[StreamFacts]:
    held = {id(run) for engine in sources.workers for run in engine.held().values()}
    if sources.upstream is not None:
        held |= sources.upstream.held().keys()
    found = []
    for stream, running in streams.items():
        request = stream.request
        if running is None:
            found.append(StreamFacts(request.id, request.ingress, ""))
            continue
        run = inner(running.run)
        found.append(
            StreamFacts(
                request.id,
                request.ingress,
                running.engine.name,
                driven=not running.task.done(),
                held=run is None or id(run) in held,
            )
        )
    return found


def _worker(engine: WorkerEngine, written: dict[int, Stream]) -> EngineFacts:
    keeper, health = engine.keeper, engine.health()
    serves = keeper.state == "ready" and keeper.wanted
    return EngineFacts(
        name=engine.name,
        slots=health.slots,
        held=_held(engine.held(), written),
        free_slots=engine.free_slots if serves else None,
        owes=keeper.life is not None and keeper.life.deadline.pending,
        idle=engine.paused,
        pid=engine.pid if keeper.alive else None,
        up=serves,
    )


def _held(runs: Mapping[int, Run], written: Mapping[int, Stream]) -> tuple[Held, ...]:
    return tuple(
        Held(number, id(run) in written, run.closed_s if isinstance(run, WorkerRun) else None)
        for number, run in runs.items()
    )


def _name(task: asyncio.Task[object]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", "unknown"))


# --- what has been begun and must end -------------------------------------------------------------


def obligations(sources: Sources, now_s: float) -> Iterator[Obligation]:
    for worker in sources.workers:
        yield from of_worker(worker)
    if sources.upstream is not None:
        yield Obligation("proof of the upstream server", not sources.upstream.lost)
    if sources.overseer is not None and sources.overseer.looked_s is not None:
        yield Obligation("the overseer's look", True, sources.overseer.looked_s + _LOOK_S)
    if (guarded_s := sources.guarded_s()) is not None:
        yield Obligation("the guard's round", True, guarded_s + _ROUND_S)
    yield from _of_streams(sources, now_s)


def of_worker(engine: WorkerEngine) -> Iterator[Obligation]:
    """A worker that hangs has an owner as long as its deadline is armed."""
    keeper, name = engine.keeper, engine.name
    yield Obligation(f"{name}: its next worker", not keeper.lost)
    if keeper.life is None or not keeper.alive:
        if keeper.kept and not keeper.parked:
            yield Obligation(f"{name}: start", True, keeper.due_s)
        return
    if keeper.drain_until_s is not None:
        yield Obligation(f"{name}: restart with more", True, keeper.drain_until_s)
    due_s = keeper.life.deadline.due_s
    loads = keeper.state == "starting" and keeper.drain_until_s is None
    runs = not engine.paused and any(run.closed_s is None for run in engine.held().values())
    if keeper.wanted and (loads or runs or due_s is not None):
        what = "load" if loads else "step" if runs else "answer"
        yield Obligation(f"{name}: {what}", due_s is not None, due_s)


def _of_streams(sources: Sources, now_s: float) -> Iterator[Obligation]:
    healths = [(link, link.health()) for link in sources.links]
    serving = [(link, now) for link, now in healths if now.state == "ready" and now.admits]
    ready = [link for link, _ in serving]
    newcomers = {link.name for link, now in serving if now.newcomers}
    has_slot = {link.name for link in ready if link.capacity() > 0}
    coming = [link for link, now in healths if now.state != "off"]
    for stream, running in sources.scheduler.streams.items():
        due_s = stream.request.deadline_s
        if due_s is not None and due_s < now_s:
            yield Obligation(f"deadline of stream {stream.request.id}", True, due_s)
        if running is not None:
            continue
        what = "start" if stream.moves is None else "hand-over"
        if has_slot and not has_slot.isdisjoint(_open_to(stream, ready, newcomers)):
            where = "an engine has a slot for it"
            yield Obligation(f"{what} of stream {stream.request.id}: {where}", False)
        elif not any(map(stream.suits, coming)):
            where = "no engine will take it"
            yield Obligation(f"{what} of stream {stream.request.id}: {where}", False)


def _open_to(stream: Stream, ready: Sequence[Link], newcomers: Collection[str]) -> list[str]:
    """Names of the engines that the scheduler would start it on, were there a slot."""
    suiting = [link.name for link in ready if stream.suits(link)]
    if stream.moves is not None:
        return suiting
    return [name for name in suiting[:1] if name in newcomers]
