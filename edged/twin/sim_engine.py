"""SimEngine: an Engine whose steps take the time a board model says, on any event loop.

The real plan decides what runs; nothing is computed. Streams give `max_tokens` ids and end with
"length". Obeys Limits within one step. Never touches text, sockets or a wall clock.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

from edged.core import Health, Limits, Request, Step
from edged.errors import EngineFault
from edged.twin.plant import Plant
from edged.twin.sim_run import Allocator, SimRun, Work
from edged.worker.even_pace import EvenPace
from edged.worker.plan import Gears, Memory, Move, SlotView, StepPlan, plan_step

Planner = Callable[
    [Sequence[SlotView], int, Limits, Gears, Memory], tuple[StepPlan | Move | None, Memory]
]
_TURNAROUND_S = 1e-6  # so that what a step caused has happened before the next is planned
_RESET_S = 60.0  # the chip reached its reset point: reboot and load (assumed)


class SimEngine:
    """See edged.engine.Engine. planner: `plan_step`, or `blocking_plan` for an unguarded stack,
    which also ignores Limits and asks for memory without looking."""

    def __init__(
        self,
        name: str,
        model: str,
        plant: Plant,
        slots: int,
        allocator: Allocator,
        guarded: bool = True,
        jitter: float = 0.0,
        seed: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.model = model
        self.on_change = on_change
        self.work = Work()
        self.limits = Limits(max_batch=slots)
        self._plant = plant
        self._slots = slots
        self._allocator = allocator
        self._guarded = guarded
        self._planner: Planner = plan_step if guarded else blocking_plan
        self._gears = Gears(_batch_gears(slots), (), (plant.board.model.context_tokens,))
        self._memory = self._planned = Memory(context=plant.board.model.context_tokens)
        self._jitter = jitter
        self._random = random.Random(seed)
        self._runs: dict[int, SimRun] = {}  # by slot
        self._orders = 0
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pace = EvenPace()
        self._step_began_s: float | None = None
        self._off_until_s = 0.0
        self._resets = 0

    # --- the seam --------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self._task is None or not self.limits.admit or self._is_off():
            return 0
        free = self._slots - len(self._runs)
        return min(free, self._allocator.free_streams()) if self._guarded else free

    def run(self, request: Request, prefix: Sequence[int]) -> SimRun:
        if self._task is None or self._is_off():
            raise EngineFault(f"engine {self.name} is not ready")
        taken = self._allocator.take()
        jitter_z = self._random.gauss(0.0, 1.0)
        run = SimRun(request, len(prefix), taken, jitter_z, self._wakeup.set)
        run.served = min((r.served for r in self._runs.values()), default=0)
        run.order = self._orders
        self._orders += 1
        self._runs[min(set(range(self._slots)) - self._runs.keys())] = run
        self._wakeup.set()
        return run

    def set_limits(self, limits: Limits) -> None:
        admitted = self.limits.admit
        self.limits = limits
        self._wakeup.set()
        if limits.admit and not admitted:
            self.on_change()

    def health(self) -> Health:
        state = "off" if self._task is None else "starting" if self._is_off() else "ready"
        return Health(state, "simulated", running=len(self._runs), slots=self._slots)  # type: ignore[arg-type]

    async def start(self) -> None:
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # --- what the guard sees ---------------------------------------------------------------------

    @property
    def streams(self) -> int:
        return len(self._runs)

    @property
    def filling(self) -> int:
        """Streams whose prompt is not computed yet."""
        return sum(run.remaining > 1 for run in self._runs.values())

    def busy_s(self, now_s: float) -> float:
        """Seconds spent executing so far, the running step counted up to now."""
        done = self.work.decode_busy_s + self.work.prefill_busy_s
        return done if self._step_began_s is None else done + now_s - self._step_began_s

    # --- the step loop ---------------------------------------------------------------------------

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._drop_closed()
            self._wakeup.clear()
            plan = self._next_plan()
            wait_s = math.inf if plan is None else self._wait_s(plan)
            if plan is None or wait_s > 0:
                await self._sleep(wait_s)
                continue
            self._memory = self._planned  # counted only now: a plan may wait and change
            members = [self._runs[slot] for slot, _ in plan.fresh]
            jitter = self._step_jitter(members)
            self._plant.sync(loop.time())
            tokens = plan.fresh[0][1] if plan.kind == "prefill" else 1
            seconds = self._plant.execute(
                len(members), tokens, plan.context, len(self._runs), jitter
            )
            await self._execute(plan, seconds, jitter)

    async def _execute(self, plan: StepPlan, seconds: float, jitter: float) -> None:
        loop = asyncio.get_running_loop()
        self._step_began_s = began_s = loop.time()
        await asyncio.sleep(seconds)
        self._step_began_s = None
        self._plant.sync(loop.time())
        self._pace.record(began_s, loop.time(), self._closes(plan), self.limits.duty)
        self._book(plan, seconds, jitter)
        if self._plant.resets > self._resets:
            await self._reset()
        else:
            self._report(plan)
            await asyncio.sleep(_TURNAROUND_S)

    def _next_plan(self) -> StepPlan | None:
        while True:
            views = [
                SlotView(slot, run.rows, run.remaining, run.served, run.order)
                for slot, run in self._runs.items()
            ]
            plan, self._planned = self._planner(
                views, self._slots, self.limits, self._gears, self._memory
            )
            if not isinstance(plan, Move):
                return plan
            self._memory = self._planned
            self._runs[plan.target] = self._runs.pop(plan.source)

    def _step_jitter(self, members: Sequence[SimRun]) -> float:
        """Log-normal; as wide for a full batch as for one stream, constant over a request."""
        if not self._jitter:
            return 1.0
        z = sum(run.jitter_z for run in members) / math.sqrt(len(members))
        return math.exp(self._jitter * z)

    def _book(self, plan: StepPlan, seconds: float, jitter: float) -> None:
        work = self.work
        if plan.kind == "prefill":
            work.prefill_steps += 1
            work.prefill_tokens += plan.fresh[0][1]
            work.prefill_busy_s += seconds
        else:
            work.decode_steps += 1
            work.decode_rows += len(plan.fresh)
            work.decode_busy_s += seconds
        duty = self.limits.duty if self._guarded else 1.0
        work.jitter_s += seconds * (1.0 - 1.0 / jitter) / max(duty, 0.01)

    def _report(self, plan: StepPlan) -> None:
        ended = False
        for slot, rows in plan.fresh:
            run = self._runs[slot]
            run.rows += rows
            run.remaining -= rows
            if run.closed or run.remaining > 0:
                continue
            run.remaining = 1  # the token just drawn
            run.made += 1
            run.served += 1
            self.work.tokens += 1
            last = run.made >= run.wanted
            run.give(Step((run.made % 1000,), finish="length" if last else None))
            if last:
                self._release(slot)
                ended = True
        if ended:
            self.on_change()

    def _drop_closed(self) -> None:
        closed = [slot for slot, run in self._runs.items() if run.closed]
        for slot in closed:
            self._release(slot)
        if closed:
            self.on_change()

    def _release(self, slot: int) -> None:
        self._allocator.give(self._runs.pop(slot).taken)

    def _closes(self, plan: StepPlan) -> bool:
        """False for a prefill chunk that a decode step of others follows."""
        return plan.kind == "decode" or all(run.remaining > 1 for run in self._runs.values())

    def _wait_s(self, plan: StepPlan) -> float:
        if not self._guarded:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        return self._pace.wait_s(now_s, self.limits.duty, self._closes(plan))

    async def _sleep(self, wait_s: float) -> None:
        """Until then, or until new Limits, a new stream or a leaving one change the plan."""
        timer = None
        if wait_s < math.inf:
            timer = asyncio.get_running_loop().call_later(wait_s, self._wakeup.set)
        await self._wakeup.wait()
        if timer is not None:
            timer.cancel()

    async def _reset(self) -> None:
        """The chip reset itself: everything in it is lost, and it is away for a while."""
        self._resets = self._plant.resets
        loop = asyncio.get_running_loop()
        self._off_until_s = loop.time() + _RESET_S
        fault = EngineFault("the chip reached its reset temperature")
        runs = list(self._runs.items())
        for slot, run in runs:
            self._release(slot)
            run.fail(fault)
        await asyncio.sleep(_RESET_S)
        self.on_change()

    def _is_off(self) -> bool:
        return asyncio.get_running_loop().time() < self._off_until_s


def _batch_gears(slots: int) -> tuple[int, ...]:
    """Any width up to the slots: the fitted model knows every batch size."""
    return tuple(range(1, slots + 1))


def blocking_plan(
    views: Sequence[SlotView], slots: int, limits: Limits, gears: Gears, memory: Memory
) -> tuple[StepPlan | None, Memory]:
    """An unguarded stack: whole prompts first, everybody waits, then all decode; no Limits."""
    filling = [view for view in views if view.remaining > 1]
    if filling:
        view = min(filling, key=lambda v: v.order)
        rows = view.remaining - 1  # the last prompt token goes with the first decode step
        step = StepPlan("prefill", view.index, 1, rows, memory.context, ((view.index, rows),))
        return step, memory._replace(last="prefill")
    if not views:
        return None, memory
    fresh = tuple((view.index, 1) for view in views)
    return StepPlan("decode", 0, len(views), 1, memory.context, fresh), memory
