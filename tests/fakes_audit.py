"""Engines on which the self-audit can be tried: fakes that tell what they hold, and may leak it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakes import FakeEngine, FakeRun, LetterText

from edged.audit_facts import Sources
from edged.metrics import Metrics
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream
from edged.watch import Watch


@dataclass
class FakeKeeper:
    """Of an engine without a process."""

    state: str = "ready"
    wanted: bool = True
    alive: bool = False
    life: None = None
    kept: bool = False
    lost: bool = False
    parked: bool = False
    wedged: str = ""
    due_s: float = 0.0


class HonestEngine(FakeEngine):
    """leaks: slots of cancelled runs are never given back; forgets: runs are held by nobody."""

    paused = False
    pid = None
    leaks = forgets = False

    def __init__(self, slots: int = 2, step_s: float = 0.1, name: str = "fake") -> None:
        super().__init__(slots, step_s, name)
        self.keeper = FakeKeeper()

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.held())

    def held(self) -> dict[int, FakeRun]:
        return {} if self.forgets else {id(run): run for run in self.runs}

    def _free(self, run: FakeRun) -> None:
        if not (self.leaks and run.closed):
            super()._free(run)


class AuditBench:
    """A scheduler on such engines and a watch over both. connections, jobs: what clients there
    are said to be."""

    def __init__(self, slots: int = 2, spares: int = 0, max_requests: int = 8) -> None:
        self.connections = self.jobs = 100
        self.engines = [HonestEngine(slots)]
        self.engines += [HonestEngine(slots, 0.3, f"spare{i}") for i in range(spares)]
        self.engine = self.engines[0]
        self.scheduler = Scheduler(
            self.engines,
            {"fake": LetterText()},  # type: ignore[dict-item]
            Queue[Stream](max_requests, 10_000, aging_s=10.0),
        )
        for engine in self.engines:
            engine.on_change = self.scheduler.dispatch
        self.metrics = Metrics("node", "fake")
        self.watch = Watch(self.sources(lambda: self.connections, lambda: self.jobs), self.metrics)

    def sources(self, connections: Callable[[], int], jobs: Callable[[], int]) -> Sources:
        return Sources(
            scheduler=self.scheduler,
            links=self.engines,
            workers=self.engines,  # type: ignore[arg-type]
            upstream=None,
            overseer=None,
            connections=connections,
            jobs=jobs,
        )
