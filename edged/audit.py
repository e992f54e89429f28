"""Self-audit, pure: facts of one moment -> what does not add up, in words.

Owns what must be equal or bounded, and how long a difference may last before it counts (things
are in motion). Never looks anything up: audit_facts.py does; never acts: watch.py does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LOOKS = 3  # audits in a row, one a second, before a difference counts
CANCEL_S = 60.0  # a cancelled run may keep the slot of a busy worker: longer than any step
GRACE_S = 2.0  # for whoever acts on a deadline
KINDS = (
    *("queue", "streams", "slots", "clients", "tasks", "descriptors", "processes"),
    *("obligation", "audit"),
)

_TASKS = 64  # of the daemon itself
_TASKS_PER = 4  # connection or MQTT request
_SPARE_DESCRIPTORS = 64  # at once: pipes of helpers, files that are read
_DRIFT_DESCRIPTORS = 16  # for good
_LEARN_LOOKS, _DRIFT_LOOKS = 60, 120


@dataclass(frozen=True)
class Held:
    """A slot of an engine that was not given back. owned: a live stream is written in it."""

    number: int
    owned: bool
    closed_s: float | None = None  # cancelled since


@dataclass(frozen=True)
class EngineFacts:
    """free_slots: as the worker's last report says. owes: a frame, by a deadline that is armed.
    idle: it was told to run nothing. pid: of its worker; up: that worker serves."""

    name: str
    slots: int
    held: tuple[Held, ...]
    free_slots: int | None = None
    owes: bool = False
    idle: bool = False
    pid: int | None = None
    up: bool = False


class StreamFacts(NamedTuple):  # one per stream and second: made in a quarter of the time
    """written_by: the engine whose run it reads; "" = it waits. driven: a task drains that run.
    held: the engine knows of the run."""

    id: str
    ingress: str
    written_by: str
    driven: bool = True
    held: bool = True


@dataclass(frozen=True)
class Process:
    """A child. worker: it is an engine's."""

    pid: int
    zombie: bool = False
    worker: bool = False


@dataclass(frozen=True)
class Obligation:
    """Something that has been begun and must end. owned: somebody is to act on it; due_s: loop
    time by which he does."""

    what: str
    owned: bool
    due_s: float | None = None


@dataclass(frozen=True)
class Facts:
    """None where this machine does not tell. strays: workers that even SIGKILL has not ended."""

    now_s: float
    streams: Sequence[StreamFacts] = ()
    queued: int = 0
    engines: Sequence[EngineFacts] = ()
    connections: int = 0
    jobs: int = 0  # MQTT requests
    tasks: Mapping[str, int] = field(default_factory=dict)  # by name of the coroutine
    writers: int = 0  # of server-sent events
    children: Sequence[Process] | None = None
    strays: int = 0
    obligations: Sequence[Obligation] = ()


@dataclass(frozen=True)
class Violation:
    """key: what is the same in the next audit; words: the difference."""

    kind: str
    key: str
    words: str


def violations(facts: Facts) -> list[Violation]:
    """All that does not add up at this moment; most of it may be in motion."""
    found = [
        *_queue(facts),
        *_streams(facts),
        *_clients(facts),
        *_tasks(facts),
        *_processes(facts),
        *_obligations(facts),
    ]
    for engine in facts.engines:
        found += _slots(engine, facts.now_s)
    return found


def _queue(facts: Facts) -> Iterator[Violation]:
    waiting = sum(not stream.written_by for stream in facts.streams)
    if waiting != facts.queued:
        words = f"{waiting} streams wait, {facts.queued} are in the queue"
        yield Violation("queue", "", words)


def _streams(facts: Facts) -> Iterator[Violation]:
    for stream in facts.streams:
        if not stream.written_by:
            continue
        where = f"stream {stream.id} on {stream.written_by}"
        if not stream.driven:
            yield Violation("streams", stream.id, f"{where}: nobody reads what it writes")
        elif not stream.held:
            yield Violation("streams", stream.id, f"{where}: the engine does not know of it")


def _slots(engine: EngineFacts, now_s: float) -> Iterator[Violation]:
    for held in engine.held:
        excused = engine.owes and held.closed_s is not None and now_s - held.closed_s <= CANCEL_S
        if not held.owned and not excused:
            key, state = (
                f"{engine.name} run {held.number}",
                "" if held.closed_s is None else "ended ",
            )
            words = (
                f"{engine.name} holds a slot for {state}run {held.number}, which no stream reads"
            )
            yield Violation("slots", key, words)
    if engine.free_slots is None:
        return
    busy, known = engine.slots - engine.free_slots, len(engine.held)
    # What was submitted after the report is not in it: only a worker that owes nothing has it all.
    if busy > known or (busy < known and not engine.owes and not engine.idle):
        words = f"the worker of {engine.name} has {busy} slots busy, {known} are given out"
        yield Violation("slots", f"{engine.name} report", words)


def _clients(facts: Facts) -> Iterator[Violation]:
    pairs = (("http", facts.connections, "connections"), ("mqtt", facts.jobs, "MQTT requests"))
    for ingress, clients, noun in pairs:
        streams = sum(stream.ingress == ingress for stream in facts.streams)
        if streams > clients:
            yield Violation("clients", ingress, f"{streams} streams for {clients} {noun}")
    if facts.writers > facts.connections:
        words = f"{facts.writers} event streams are written to {facts.connections} connections"
        yield Violation("clients", "writers", words)


def _tasks(facts: Facts) -> Iterator[Violation]:
    tasks = sum(facts.tasks.values())
    most = _TASKS + _TASKS_PER * (facts.connections + facts.jobs) + 2 * len(facts.streams)
    if tasks > most:
        name, count = max(facts.tasks.items(), key=lambda item: item[1])
        yield Violation("tasks", "", f"{tasks} tasks, {most} at most expected; {count} are {name}")


def _processes(facts: Facts) -> Iterator[Violation]:
    if facts.children is None:
        return
    owners = {engine.pid for engine in facts.engines}
    pids = {child.pid for child in facts.children}
    for engine in facts.engines:
        if engine.up and engine.pid is not None and engine.pid not in pids:
            words = f"{engine.name} serves and its worker {engine.pid} is not there"
            yield Violation("processes", f"{engine.pid}", words)
    for child in facts.children:
        if child.zombie:
            words = f"process {child.pid} has ended and nobody has taken its exit"
            yield Violation("processes", f"{child.pid}", words)
    strays = [c.pid for c in facts.children if c.worker and not c.zombie and c.pid not in owners]
    for pid in strays[facts.strays :]:
        yield Violation("processes", f"{pid}", f"worker {pid} belongs to no engine")


def _obligations(facts: Facts) -> Iterator[Violation]:
    for one in facts.obligations:
        if not one.owned:
            yield Violation("obligation", one.what, f"{one.what}: nobody is to act on it")
        elif one.due_s is not None and facts.now_s - one.due_s > GRACE_S:
            late_s = facts.now_s - one.due_s
            words = f"{one.what}: due {late_s:.1f} s ago and nobody has acted"
            yield Violation("obligation", one.what, words)


class Patience:
    """What is found in LOOKS audits in a row counts; keeps as much as is found at once."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._seen: dict[tuple[str, str], int] = {}

    def feed(self, found: Iterable[Violation]) -> tuple[list[Violation], list[Violation]]:
        """(all that count now, those of them that did not at the last audit)."""
        now = {(one.kind, one.key): one for one in found}
        self._seen = {key: self._seen.get(key, 0) + 1 for key in now}
        counts = [one for key, one in now.items() if self._seen[key] >= self._looks]
        return counts, [one for one in counts if self._seen[one.kind, one.key] == self._looks]


class Descriptors:
    """Open files that no connection and no process accounts for: neither many nor ever more.

    The lowest number of the first minute is what is normal.
    """

    def __init__(self) -> None:
        self._normal: int | None = None
        self._looks = 0
        self._lowest: deque[int] = deque(maxlen=_DRIFT_LOOKS)

    def feed(self, open_files: int, accounted: int) -> list[Violation]:
        other = max(0, open_files - accounted)
        if self._normal is None or self._looks < _LEARN_LOOKS:
            self._looks += 1
            self._normal = other if self._normal is None else min(self._normal, other)
        self._lowest.append(other)
        words = f"{other} open files belong to no connection or process, {self._normal} are normal"
        if other > self._normal + _SPARE_DESCRIPTORS:
            return [Violation("descriptors", "many", words)]
        full = len(self._lowest) == _DRIFT_LOOKS
        if full and min(self._lowest) > self._normal + _DRIFT_DESCRIPTORS:
            return [Violation("descriptors", "more", f"{words}, and they stay")]
        return []
