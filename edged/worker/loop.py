"""The step loop: read the socket, plan, run, sample, report. Open this file first.

Owns the streams of this process. Decisions are in plan.py and slots.py, tokens in sampler.py,
the device behind executor.py. It waits only on the socket, so cancels and limits act at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from edged import wire
from edged.core import Limits
from edged.errors import WireError
from edged.worker.contract import ModelSpec
from edged.worker.executor import Executor, Floats, StepError
from edged.worker.faults import STEP_ATTEMPTS, located
from edged.worker.link import Link
from edged.worker.pace import Pace
from edged.worker.plan import Memory, Move, StepPlan, plan_step
from edged.worker.probe import Probe
from edged.worker.rows import batch_of
from edged.worker.rules import log
from edged.worker.sampler import FAULT, Draw, Sampler
from edged.worker.selftest import SelfTester
from edged.worker.slots import Slot, SlotTable
from edged.worker.stream import Stream
from edged.worker.submit import finish_at_once, refusal


class StepLoop:
    def __init__(
        self,
        link: Link,
        executor: Executor,
        spec: ModelSpec,
        limits: Limits,
        slots: int,
        slowest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        tester: SelfTester | None = None,
    ) -> None:
        self._link = link
        self._executor = executor
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._table = SlotTable(slots)
        self._streams: dict[int, Stream] = {}  # by id, in order of arrival
        self._sampler = Sampler(spec.vocab_tokens)
        self._pace = Pace(slowest_s)
        self._memory = self._planned = Memory(executor.context)
        self._ended: list[wire.Row] = []
        self._arrivals = 0
        self._failed_attempts = 0
        self._promised = False
        self._probe = Probe(link, executor, tester, clock)

    def serve(self) -> None:
        """Until Shutdown. Raises LinkClosed, WireError, MemoryError, StepError."""
        while self.turn(self._wait_s()):
            pass

    def turn(self, timeout_s: float | None = 0.0) -> bool:
        """Read what has arrived, waiting at most timeout_s, then run at most one step.

        False after Shutdown.
        """
        for message in self._link.receive(timeout_s):
            if isinstance(message, wire.Shutdown):
                return False
            self._apply(message)
        if self._ended:
            self._report(self._ended, None, 0.0)
            self._ended = []
        self._self_test()
        plan = self._next_plan()
        if plan is not None and self._pause_s(plan) <= 0:
            with located(plan.kind):
                self._step(plan)
            self._self_test()  # here, for a slot that came free is still nobody's
        return True

    # --- what the daemon says --------------------------------------------------------------------

    def _apply(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Submit):
            self._submit(message)
        elif isinstance(message, wire.Cancel):
            stream = self._streams.get(message.stream)
            if stream is not None:
                self._ended.append(stream.end("cancelled"))
                self._free(stream)
        elif isinstance(message, wire.SetLimits):
            # `admit` is the daemon's to obey: what has been submitted is served.
            self._limits = Limits(
                message.max_batch, message.duty, message.prefill_chunk, message.admit
            )
            if self._streams:
                self._promise()
        elif isinstance(message, wire.SelfTest):
            self._probe.ask()
        else:
            raise WireError(f"unexpected {type(message).__name__} frame while serving")

    def _submit(self, ask: wire.Submit) -> None:
        if ask.stream in self._streams:
            log(f"ignored a second submit of stream {ask.stream}")
            return
        reason = refusal(ask, self._spec)
        if reason or finish_at_once(ask, self._spec):
            finish = "row_fault" if reason else "length"
            self._ended.append(wire.Row(ask.stream, [], [], finish, reason, 0))
            return
        slot = self._table.take(ask.tokens)
        if slot is None:
            detail = f"all {len(self._table.slots)} slots are busy; submit when one is free"
            self._ended.append(wire.Row(ask.stream, [], [], "row_fault", detail, 0))
            return
        self._arrivals += 1
        served = min((s.served for s in self._streams.values()), default=0)
        self._streams[ask.stream] = Stream(ask.stream, slot, Draw(ask), served, self._arrivals)

    # --- one step --------------------------------------------------------------------------------

    def _next_plan(self) -> StepPlan | None:
        while True:
            views = sorted((s.view() for s in self._streams.values()), key=lambda v: v.index)
            plan, memory = plan_step(
                views, len(self._table.slots), self._limits, self._executor.gears, self._memory
            )
            if isinstance(plan, Move):
                self._memory = memory
                self._move(self._table.slots[plan.source], self._table.slots[plan.target])
            elif plan is None or not self._adopt_prefix(plan):
                self._planned = memory
                return plan

    def _step(self, plan: StepPlan) -> None:
        if not self._promised:
            self._promise()
        started_s = self._clock()
        with located(f"{plan.kind}: caches of {plan.context} tokens"):
            self._fit_context(plan.context)
        try:
            batch = batch_of(plan, self._table.slots, self._spec.max_context_tokens)
            logits = self._executor.run(batch)
        except StepError as error:
            self._retry_or_raise(error)
            return
        self._failed_attempts = 0
        self._memory = self._planned
        closes = self._closes_cycle(plan)
        rows = self._commit(plan, logits)
        ended_s = self._clock()
        self._pace.record(started_s, ended_s, closes, self._limits.duty)
        self._report(rows, plan, ended_s - started_s)

    def _commit(self, plan: StepPlan, logits: Floats) -> list[wire.Row]:
        """Count the new rows and draw a token for each; the news of those that came to count.

        In the middle of a prompt the token is dropped, but a row that is not finite ends the
        stream there too: its cache must not reach anybody else.
        """
        streams = {s.slot.index: s for s in self._streams.values()}
        active = [streams[index] for index, _ in plan.fresh]
        for stream, (_, count) in zip(active, plan.fresh, strict=True):
            stream.slot.rows += count
        drawn = self._sampler.draw(logits, [(s.slot.index - plan.lo, s.draw) for s in active])
        rows = [
            stream.accept(token, self._spec)
            for stream, token in zip(active, drawn, strict=True)
            if token.token == FAULT or stream.slot.rows == len(stream.slot.tokens)
        ]
        for row in rows:
            if row.finish:
                self._free(self._streams[row.stream], trusted=row.finish != "row_fault")
        return rows

    # --- slots and memory ------------------------------------------------------------------------

    def _free(self, stream: Stream, trusted: bool = True) -> None:
        """Give the slot back; an untrusted one is zeroed first, for 0 x NaN is NaN."""
        del self._streams[stream.id]
        if trusted:
            self._table.release(stream.slot)
        else:
            self._executor.zero_slot(stream.slot.index)
            self._table.forget(stream.slot)

    def _adopt_prefix(self, plan: StepPlan) -> bool:
        """Before a stream's first step: copy the rows of a slot that shares more of its prompt.
        True when that changed what is left to compute."""
        first = {index for index, _ in plan.fresh}
        copied = False
        for stream in self._streams.values():
            if stream.started or stream.slot.index not in first:
                continue
            slot = stream.slot
            donor = self._table.donor(slot)
            if donor is not None:
                source, rows = donor
                self._executor.copy_rows(source.index, slot.index, rows)
                slot.rows, copied = rows, True
            stream.started = True
            stream.cached_tokens = min(slot.rows, stream.draw.ask.prompt_tokens)
        return copied

    def _move(self, source: Slot, target: Slot) -> None:
        self._executor.copy_rows(source.index, target.index, source.rows)
        self._table.move(source, target)
        for stream in self._streams.values():
            if stream.slot is source:
                stream.slot = target

    def _fit_context(self, context: int) -> None:
        if context != self._executor.context:
            self._table.truncate(context)
            self._executor.repack(context, [slot.rows for slot in self._table.slots])

    def _retry_or_raise(self, error: StepError) -> None:
        """Nothing was counted, so the same step is planned again; a lasting fault is fatal."""
        self._failed_attempts += 1
        log(f"step failed, attempt {self._failed_attempts} of {STEP_ATTEMPTS}: {error}")
        if self._failed_attempts >= STEP_ATTEMPTS:
            raise error

    def _self_test(self) -> None:
        """The one that was asked for, if it can run now."""
        if self._probe.left_s() is None:
            return
        step_deadline_s = self._pace.deadline_s(self._clock(), 1.0)
        if self._probe.answer(self._table, self._paused(), step_deadline_s):
            self._promise()

    # --- what the daemon hears -------------------------------------------------------------------

    def _report(self, rows: list[wire.Row], plan: StepPlan | None, step_s: float) -> None:
        kind, batch, tokens = (plan.kind, plan.batch, plan.tokens) if plan else ("none", 0, 0)
        deadline_s = self._deadline_s()
        self._promised = deadline_s > 0
        self._link.send(
            wire.Report(
                rows=rows,
                kind=kind,
                batch=batch,
                tokens=tokens,
                context=self._executor.context,
                step_s=step_s,
                free_slots=self._table.free_count,
                deadline_s=deadline_s,
            )
        )

    def _promise(self) -> None:
        deadline_s = self._deadline_s()
        self._promised = deadline_s > 0
        self._link.send(wire.Phase("step", deadline_s))

    # --- when ------------------------------------------------------------------------------------

    def _wait_s(self) -> float | None:
        """How long nothing but the socket matters; None = until it says something."""
        if not self._runnable():
            return self._probe.left_s()
        plan = self._next_plan() if self._limits.duty < 1 else None
        return self._pause_s(plan) if plan is not None else 0.0

    def _pause_s(self, plan: StepPlan) -> float:
        return self._pace.wait_s(self._clock(), self._limits.duty, self._closes_cycle(plan))

    def _closes_cycle(self, plan: StepPlan) -> bool:
        """False for a prefill chunk that a decode step follows; to be asked before it runs."""
        return plan.kind == "decode" or all(
            len(s.slot.tokens) - s.slot.rows > 1 for s in self._streams.values()
        )

    def _deadline_s(self) -> float:
        if not self._runnable():
            return 0.0
        return self._pace.deadline_s(self._clock(), self._limits.duty)

    def _runnable(self) -> bool:
        return bool(self._streams) and not self._paused()

    def _paused(self) -> bool:
        return self._limits.max_batch <= 0 or self._limits.duty <= 0
