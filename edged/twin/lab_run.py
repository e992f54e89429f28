"""One run of the lab: the real scheduler, a policy and a simulated engine on the virtual loop.

Deterministic by seed: `run` of equal arguments gives equal figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from edged.core import Reading
from edged.guard.policy import NPU, Decision, Levers, Load, Seen
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream
from edged.twin import lab_scenario as scenarios
from edged.twin.lab_clients import MODEL, Clients, LabText, Record
from edged.twin.lab_memory import Arena, Direct
from edged.twin.lab_policies import LabPolicy
from edged.twin.lab_scenario import Scenario
from edged.twin.lab_sensor import LabSensor
from edged.twin.physics import Board, ThermalState, fan_resistance
from edged.twin.plant import Plant, Totals
from edged.twin.sim_engine import SimEngine
from edged.twin.sim_run import Work
from edged.twin.virtual_loop import run_virtual


@dataclass(frozen=True)
class Sample:
    """One line of the timeline, once per sensor interval."""

    at_s: float
    temperature_c: float
    clock_mhz: float
    batch: int
    duty: float
    tokens: int  # since the run began
    fan_ratio: float


@dataclass
class Outcome:
    """Everything one run left behind."""

    scenario: Scenario
    records: list[Record]
    totals: Totals
    tokens: int  # delivered after the warm-up
    timeline: list[Sample] = field(default_factory=list)


PolicyFactory = Callable[[Scenario, Board, Levers], LabPolicy]


def levers_of(scenario: Scenario, board: Board) -> Levers:
    batches = tuple(range(1, scenario.slots + 1))
    gears = board.clock.gears_mhz if board.clock.settable else ()
    return Levers(gears, batches, scenario.levers.fan and board.fan.present)


def run(scenario: Scenario, make: PolicyFactory) -> Outcome:
    return run_virtual(_Lab(scenario, make).run())


class _Lab:
    def __init__(self, scenario: Scenario, make: PolicyFactory) -> None:
        self._scenario = scenario
        self._board = scenarios.board_of(scenario)
        self._levers = levers_of(scenario, self._board)
        self._policy = make(scenario, self._board, self._levers)
        self._fan_ratio = scenarios.fan_ratio_of(scenario, self._board)
        self._cpu_duty = 1.0
        resistance = self._resistance(0.0)
        ambient_c = scenarios.ambient_at(scenario, self._board, 0.0)
        rest = replace(ThermalState.at_rest(self._board, ambient_c), resistance=resistance)
        self._plant = Plant(
            self._board,
            scenario.limit_c,
            rest.settled(self._board.power.idle_w),
            self._board.max_mhz,
        )
        self._sensor = LabSensor(scenario.sensor)
        self._engine = SimEngine(
            NPU,
            MODEL,
            self._plant,
            scenario.slots,
            _allocator(scenario, self._board),
            guarded=self._policy.guarded,
            jitter=scenario.jitter,
            seed=scenario.seed,
        )
        queue: Queue[Stream] = Queue(64, 262_144, 10.0)
        self._scheduler = Scheduler([self._engine], {MODEL: LabText()}, queue)  # type: ignore[dict-item]
        self._engine.on_change = self._scheduler.dispatch
        self._clients = Clients(
            self._scheduler,
            scenario.load,
            scenario.seed,
            lambda: self._engine.work.jitter_s,
        )
        self._work = Work()
        self._busy_s = 0.0
        self._bursts: set[asyncio.Task[Record]] = set()
        self._timeline: list[Sample] = []

    async def run(self) -> Outcome:
        scenario, loop = self._scenario, asyncio.get_running_loop()
        await self._engine.start()
        interval_s = scenario.sensor.interval_s
        tokens_before, ticks, warm = 0, 0, False
        while loop.time() < scenario.duration_s - 1e-6:
            self._tick(loop.time(), interval_s)
            ticks += 1
            until_s = ticks * interval_s
            if not warm and until_s > scenario.warmup_s:
                await asyncio.sleep(scenario.warmup_s - loop.time())
                self._plant.sync(loop.time())
                self._plant.totals = Totals()
                tokens_before, warm = self._engine.work.tokens, True
            await asyncio.sleep(until_s - loop.time())
        self._plant.sync(loop.time())
        await self._clients.stop()
        await self._engine.stop()
        return Outcome(
            scenario,
            self._clients.records,
            self._plant.totals,
            self._engine.work.tokens - tokens_before,
            self._timeline,
        )

    # --- one tick --------------------------------------------------------------------------------

    def _tick(self, now_s: float, interval_s: float) -> None:
        plant, scenario = self._plant, self._scenario
        plant.sync(now_s)
        plant.surround(scenarios.ambient_at(scenario, self._board, now_s), self._resistance(now_s))
        cpu_wants = scenarios.step_at(scenario.surroundings.cpu_ratio, now_s)
        plant.cpu_ratio = min(cpu_wants, self._cpu_duty)
        self._load_clients(now_s, interval_s)
        decision = self._policy.decide(self._see(now_s, interval_s, cpu_wants))
        if decision is not None:
            self._obey(decision)
        self._timeline.append(
            Sample(
                now_s,
                plant.temperature_c,
                plant.mhz,
                min(self._engine.limits.max_batch, self._engine.streams),
                self._engine.limits.duty,
                self._engine.work.tokens,
                self._fan_ratio,
            )
        )

    def _load_clients(self, now_s: float, interval_s: float) -> None:
        load = self._scenario.load
        self._clients.set_count(int(scenarios.step_at(load.clients, now_s)))
        if load.burst_every_s and now_s % load.burst_every_s < interval_s:
            self._bursts = {task for task in self._bursts if not task.done()}
            self._bursts |= set(self._clients.burst(load.burst_requests))

    def _see(self, now_s: float, interval_s: float, cpu_wants: float) -> Seen:
        plant = self._plant
        temperature_c = self._sensor.read(now_s, plant.temperature_c)
        reading = None
        if temperature_c is not None:
            reading = Reading("lab", now_s, temperature_c, plant.mhz)
        busy_s = self._engine.busy_s(now_s)
        before, self._work = self._work, replace(self._engine.work)
        work = self._work
        npu = Load(
            streams=self._engine.streams,
            filling=self._engine.filling,
            waiting=self._scheduler.load().waiting,
            busy_ratio=min(1.0, (busy_s - self._busy_s) / interval_s),
            decode_steps=work.decode_steps - before.decode_steps,
            decode_rows=work.decode_rows - before.decode_rows,
            decode_busy_s=work.decode_busy_s - before.decode_busy_s,
            prefill_steps=work.prefill_steps - before.prefill_steps,
            prefill_tokens=work.prefill_tokens - before.prefill_tokens,
            prefill_busy_s=work.prefill_busy_s - before.prefill_busy_s,
            tokens=work.tokens - before.tokens,
        )
        self._busy_s = busy_s
        cpu = Load(streams=int(cpu_wants > 0), busy_ratio=plant.cpu_ratio)
        return Seen(now_s, reading, npu, cpu)

    def _obey(self, decision: Decision) -> None:
        if NPU in decision.limits:
            self._engine.set_limits(decision.limits[NPU])
        if "cpu" in decision.limits:
            self._cpu_duty = decision.limits["cpu"].duty
        if decision.frequency_mhz is not None and self._levers.frequencies_mhz:
            self._plant.wanted_mhz = decision.frequency_mhz
        if decision.fan_ratio is not None and self._levers.fan:
            self._fan_ratio = decision.fan_ratio

    def _resistance(self, now_s: float) -> float:
        factor = scenarios.step_at(self._scenario.surroundings.resistance, now_s)
        return factor * fan_resistance(self._board, self._fan_ratio)


def _allocator(scenario: Scenario, board: Board) -> Arena | Direct:
    if scenario.allocator == "arena":
        return Arena(scenario.slots)
    model = board.model
    stream_bytes = int(model.kv_bytes_per_token * model.context_tokens)
    return Direct(int(board.memory.free_after_load_bytes), stream_bytes)


def without_jitter(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, jitter=0.0)
