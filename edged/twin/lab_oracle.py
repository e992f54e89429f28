"""The oracle: the best constant (frequency, batch, duty) under the limit, from the true numbers.

It knows board, weather and load of the moment, but only steady states: the chip settles exactly
at the limit. It obeys the same pace, levers and chunk rule as the policy it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edged.core import Limits
from edged.guard import choice
from edged.guard.choice import Budget, Gear, Option
from edged.guard.policy import CPU, DUTY_FLOOR, NPU, Decision, Levers, Seen
from edged.twin import lab_scenario as scenarios
from edged.twin.lab_scenario import Scenario
from edged.twin.physics import (
    Board,
    busy_power_w,
    cpu_power_w,
    fan_resistance,
    step_time_s,
)

_LIMITED = 0.98


@dataclass(frozen=True)
class Cycle:
    """What `streams` clients make an engine do, on average, between two decode steps.

    Each prompt takes `chunks` steps of its own, one per cycle, and sits out the decode steps in
    between; so a decode step holds fewer rows than there are streams, unless others wait.
    """

    rows: float
    chunk_ratio: float  # cycles with a prefill chunk
    chunk_tokens: int


def cycle(scenario: Scenario, streams: int, batch: int, chunk_tokens: int) -> Cycle:
    prompt = scenario.load.prompt_tokens - 1
    chunks = math.ceil(prompt / chunk_tokens)
    answer = scenario.load.answer_tokens
    if streams == 1:  # alone: the whole prompt, then decode
        return Cycle(1.0, prompt / chunk_tokens / answer, chunk_tokens)
    rows = min(batch, streams / (1 + (chunks - 1) / answer))
    rows = min(rows, answer / chunks)  # prompts may arrive faster than one chunk per cycle
    return Cycle(rows, rows * chunks / answer, chunk_tokens)


def chunk_for(scenario: Scenario, board: Board, streams: int, largest: int) -> int:
    """By the policy's own rule, from the true costs."""
    context, load = board.model.context_tokens, scenario.load
    step_s = step_time_s(board, streams, 1, context, board.max_mhz)
    arriving = streams * (load.prompt_tokens - 1) / load.answer_tokens * 0.97
    return choice.chunk_tokens(
        lambda size: step_time_s(board, 1, size, context, board.max_mhz),
        step_s,
        arriving if streams > 1 else 0.0,
        largest,
    )


@dataclass
class Oracle:
    """`oracle` of the lab. The clock is its only memory: it may change as often as ours."""

    scenario: Scenario
    board: Board
    levers: Levers
    guarded: bool = True
    _key: object = None
    _decision: Decision | None = None
    _gear: Gear = None
    _budget: Budget = field(default_factory=Budget)

    def decide(self, seen: Seen) -> Decision:
        """Computed again when something it depends on has moved, and while a better clock waits
        for the right to change."""
        scenario, now_s = self.scenario, seen.now_s
        around = scenario.surroundings
        key = (
            round(scenarios.ambient_at(scenario, self.board, now_s), 1),
            scenarios.step_at(around.resistance, now_s),
            scenarios.step_at(around.cpu_ratio, now_s),
            max(1, min(seen.npu.demand, scenario.slots)),
        )
        if self._decision is None or self._key != key:
            self._decision, settled = self._decide(now_s, *key)
            self._key = key if settled else None
        return self._decision

    def _decide(
        self, now_s: float, ambient_c: float, resistance: float, cpu_ratio: float, demand: int
    ) -> tuple[Decision, bool]:
        """The decision, and whether it is at the best clock there is."""
        fan = 1.0 if self.levers.fan else None
        ratio = fan or scenarios.fan_ratio_of(self.scenario, self.board)
        resistance *= fan_resistance(self.board, ratio)
        found, lowest, hopeless = self.options(ambient_c, resistance, cpu_ratio, demand)
        slo_s = self.scenario.itl_slo_s
        best = lowest if hopeless else choice.best(found, slo_s)
        full = max(o.tokens_per_s / o.point.duty for o in found)
        cpu_duty = 1.0
        if cpu_ratio and (hopeless or best.tokens_per_s < _LIMITED * full):
            cpu_duty = DUTY_FLOOR  # the CPU engine gives way
            found, lowest, hopeless = self.options(
                ambient_c, resistance, cpu_duty * cpu_ratio, demand
            )
            best = lowest if hopeless else choice.best(found, slo_s)
        settled = True
        if self.levers.frequencies_mhz and best.point.frequency_mhz != self._gear:
            here = [o for o in found if o.point.frequency_mhz == self._gear]
            stay = choice.best(here, slo_s) if here else None
            gain = best.tokens_per_s / stay.tokens_per_s if stay else 2.0
            if stay and stay.pace_s > slo_s >= best.pace_s:
                gain = 2.0
            if hopeless or self._budget.worth(gain, now_s):
                self._gear, self._budget = best.point.frequency_mhz, self._budget.spent(now_s)
            elif stay:
                best, settled = stay, False
        chunk = chunk_for(self.scenario, self.board, best.point.batch, self.levers.prefill_chunk)
        limits = {
            NPU: Limits(best.point.batch, best.point.duty, chunk),
            CPU: Limits(64, cpu_duty, chunk),
        }
        return Decision(limits, best.point.frequency_mhz, fan), settled

    def options(
        self, ambient_c: float, resistance: float, cpu_ratio: float, demand: int
    ) -> tuple[list[Option], Option, bool]:
        """All points in these surroundings, the lowest of them, and whether even that one does
        not fit."""
        board = self.board
        total_r = resistance * sum(r for r, _ in board.thermal.terms)
        idle_w = board.power.idle_w + cpu_power_w(board, cpu_ratio)
        headroom_c = self.scenario.limit_c - ambient_c - total_r * idle_w
        plant = choice.Plant(
            step_s=self._step_s(cpu_ratio),
            rise_c=lambda gear, batch: total_r * self._extra_w(gear, batch, demand),
            prefill_s=lambda gear: 0.0,
        )
        found = choice.options(
            plant, choice.gears_of(self.levers), self.levers.batches, demand, headroom_c
        )
        found = [self._with_true_speed(option, cpu_ratio, demand) for option in found]
        lowest = min(found, key=lambda o: (o.point.frequency_mhz or 0.0, o.point.batch))
        return found, lowest, headroom_c < lowest.rise_c

    def _mhz(self, gear: Gear) -> float:
        return gear or self.board.max_mhz

    def _step_s(self, cpu_ratio: float) -> Callable[[Gear, int], float]:
        context = self.board.model.context_tokens

        def step_s(gear: Gear, batch: int) -> float:
            return step_time_s(self.board, batch, 1, context, self._mhz(gear), cpu_ratio)

        return step_s

    def _parts(self, gear: Gear, batch: int, streams: int) -> tuple[Cycle, float, float]:
        """The cycle, and the seconds of its decode and its prefill."""
        board, context = self.board, self.board.model.context_tokens
        mhz = self._mhz(gear)
        chunk = chunk_for(self.scenario, board, batch, self.levers.prefill_chunk)
        work = cycle(self.scenario, streams, batch, chunk)
        one_s = step_time_s(board, 1, 1, context, mhz)
        slope_s = step_time_s(board, 2, 1, context, mhz) - one_s
        decode_s = one_s + (work.rows - 1) * slope_s
        prefill_s = work.chunk_ratio * step_time_s(board, 1, chunk, context, mhz)
        return work, decode_s, prefill_s

    def _extra_w(self, gear: Gear, batch: int, streams: int) -> float:
        """Mean watts above idle while busy, decode and prefill in their shares."""
        board, context, mhz = self.board, self.board.model.context_tokens, self._mhz(gear)
        work, decode_s, prefill_s = self._parts(gear, batch, streams)
        low = max(1, math.floor(work.rows))
        low_w = busy_power_w(board, low, 1, context, mhz)
        decode_w = low_w + (work.rows - low) * (
            busy_power_w(board, low + 1, 1, context, mhz) - low_w
        )
        prefill_w = busy_power_w(board, 1, work.chunk_tokens, context, mhz, streams=streams)
        mean_w = (decode_w * decode_s + prefill_w * prefill_s) / (decode_s + prefill_s)
        return mean_w - board.power.idle_w

    def _with_true_speed(self, option: Option, cpu_ratio: float, streams: int) -> Option:
        point = option.point
        work, decode_s, prefill_s = self._parts(point.frequency_mhz, point.batch, streams)
        slower = 1.0 + self.board.cpu.slowdown * cpu_ratio
        speed = option.point.duty * work.rows / ((decode_s + prefill_s) * slower)
        return Option(option.point, speed, option.pace_s, option.rise_c)
