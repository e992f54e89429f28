"""WorkerEngine: an Engine whose work is done by a child process that may die at any time.

Owns the table of streams in it. A stream leaves the table when the worker says so, hence
`capacity` is the worker's own truth. Whether and how a worker lives is its keeper's business.
It never touches text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edged import ladder, wire
from edged.core import Health, Limits, Request
from edged.engine import frames
from edged.engine.gate import Gate
from edged.engine.keeper import Keeper, Owner
from edged.engine.life import Means
from edged.engine.repetition import Repetition
from edged.engine.run import WorkerRun
from edged.engine.rungs import Rung
from edged.errors import EngineFault, RowFault

_ANSWER_WITHIN_S = 20.0  # from a submit to the first frame of an idle worker
_NOT_FINITE = "not finite"  # what a row fault says that may be the engine's own


class WorkerEngine:
    """See edged.engine.Engine. on_change is called whenever capacity or state may have grown,
    on_move with a label of metrics when a rung is left."""

    def __init__(
        self,
        name: str,
        model: str,
        rungs: Sequence[Rung],
        rules: ladder.Rules,
        means: Means | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.on_change: Callable[[], None] = lambda: None
        self.on_report: Callable[[wire.Report], None] = lambda report: None
        self.on_move: Callable[[str], None] = lambda reason: None
        self.closed = False  # to all but streams that another engine has lost
        self._limits: Limits | None = None
        self._runs: dict[int, WorkerRun] = {}
        self._next_stream = 0
        self._repetition = Repetition()
        self._slots = 0
        self.free_slots: int | None = None  # as the worker's last report says
        owner = Owner(
            self._on_report,
            self._on_ready,
            self._expect_step,
            self._on_gone,
            lambda: self.on_change(),
            lambda reason: self.on_move(reason),
            lambda: bool(self._runs),
        )
        self.keeper = Keeper(name, rungs, rules, means or Means(), gate or Gate(name), owner)

    # --- Engine ----------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self.keeper.state != "ready" or (self._limits is not None and not self._limits.admit):
            return 0
        return max(0, self._slots - len(self._runs))

    def run(self, request: Request, prefix: Sequence[int]) -> WorkerRun:
        life = self.keeper.life
        if self.keeper.state != "ready" or life is None:
            raise EngineFault(f"engine {self.name} is not ready: {self.keeper.detail}")
        self._check_context(request)
        stream = self._next_stream = self._next_stream + 1
        run = WorkerRun(cancel=lambda: life.send(wire.Cancel(stream)))
        # First: a refused frame takes no slot.
        life.send(frames.submit(stream, request, prefix))
        self._runs[stream] = run
        self._expect_step()
        return run

    def set_limits(self, limits: Limits) -> None:
        self._limits = limits
        life = self.keeper.life
        if self.keeper.serves and life is not None:
            life.send(frames.set_limits(limits))
            self._expect_step()
            self.on_change()

    def health(self) -> Health:
        keeper = self.keeper
        return Health(
            state=keeper.state,
            detail=keeper.detail,
            running=len(self._runs),
            slots=self._slots,
            restarts=max(0, keeper.starts - 1),
            last_progress_s=keeper.life.last_progress_s if keeper.life else None,
            rung=keeper.rung.words,
            rung_number=keeper.ladder.rung,
            memory=keeper.gate.words,
            reason=keeper.reason,
            next_climb_s=keeper.next_climb_s,
            standby=keeper.parked,
            newcomers=not self.closed,
            admits=self._limits is None or self._limits.admit,
        )

    async def start(self) -> None:
        """Return at the first READY; raise EngineFault at the first failure.

        Either way the engine keeps trying until stop().
        """
        await self.keeper.start()

    async def stop(self) -> None:
        await self.keeper.stop()

    # --- beyond the seam -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the latest worker, for status and tests."""
        return self.keeper.life.pid if self.keeper.life else None

    def held(self) -> dict[int, WorkerRun]:
        """Every run whose slot the worker has not given back; for the self-audit."""
        return dict(self._runs)

    @property
    def paused(self) -> bool:
        """A worker told to run nothing answers nothing."""
        return self._limits is not None and min(self._limits.max_batch, self._limits.duty) <= 0

    def probe(self) -> None:
        """Run the self test between two steps; an engine that fails it leaves the chain."""
        self.keeper.probe()

    def press(self, why: str) -> None:
        """The machine runs out of memory: take less, if there is a rung that does."""
        self.keeper.tell(ladder.Pressed(), why)

    # --- what is heard of the worker -------------------------------------------------------------

    def _on_ready(self, ready: wire.Ready) -> None:
        self._slots, self.free_slots = ready.slots, None
        if self._limits is not None:
            self.keeper.send(frames.set_limits(self._limits))  # before the first stream

    def _on_report(self, report: wire.Report) -> None:
        faults, self.free_slots = 0, report.free_slots
        for row in report.rows:
            run = self._runs.get(row.stream)
            if run is None:
                continue
            self._repetition.feed(row.stream, row.ids)
            if row.finish:
                self._repetition.end(row.stream)
                del self._runs[row.stream]
            faults += row.finish == "row_fault" and _NOT_FINITE in row.detail
            run.feed(row)
        self._expect_step()  # what was submitted since is not in the report
        self.on_report(report)
        for _ in range(faults):
            self.keeper.tell(ladder.RowFaulted(), "output that is not finite")
        if words := self._repetition.jumped():
            self.keeper.tell(ladder.Repeats(), words)
        if any(row.finish for row in report.rows):
            self.on_change()

    def _on_gone(self, fault: EngineFault) -> None:
        runs, self._runs, self.free_slots = self._runs, {}, None
        for stream, run in runs.items():
            self._repetition.end(stream)
            run.fail(fault)

    def _expect_step(self) -> None:
        """An idle worker has promised nothing; what it was sent it must begin all the same."""
        life = self.keeper.life
        if life is not None and self._runs and not life.deadline.pending and not self.paused:
            life.deadline.expect(_ANSWER_WITHIN_S, "begin a step")

    def _check_context(self, request: Request) -> None:
        """A rung with a shorter context does not cut an answer short: another engine has it."""
        keeper = self.keeper
        holds = keeper.rung.launch.context_tokens
        wanted = len(request.prompt_ids) + request.max_tokens
        if wanted > holds and holds < keeper.rungs[0].launch.context_tokens:
            raise RowFault(f"it needs {wanted} tokens, {keeper.rung.words} hold {holds}")
