"""A small plant for policies: a board of the physics under a load, one second per decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from edged.core import Limits, Reading
from edged.guard.policy import NPU, Decision, Levers, Load, Seen, Settings
from edged.twin import boards
from edged.twin.physics import ThermalState, busy_power_w, step_time_s

State = TypeVar("State")
Step = Callable[[Settings, Levers, State, Seen], tuple[State, Decision]]

FIELD = boards.load("field")
LEVERS = Levers(FIELD.clock.gears_mhz, tuple(range(1, 9)))
SETTINGS = Settings()


@dataclass
class Bench(Generic[State]):
    """Runs a policy step against heat; keeps every decision with its time."""

    step: Step[State]
    state: State
    levers: Levers = LEVERS
    settings: Settings = SETTINGS

    def __post_init__(self) -> None:
        self.heat = ThermalState.at_rest(FIELD)
        self.now_s = 0.0
        self.limits = Limits(1, 0.05)
        self.mhz = FIELD.max_mhz
        self.taken: list[tuple[float, Decision]] = []

    def seen(self, demand: int, temperature_c: float | None) -> Seen:
        """What a decision would look at now, the load of the last second included."""
        streams = min(demand, 8)
        batch = min(streams, self.limits.max_batch)
        busy = self.limits.duty if batch else 0.0
        step_s = step_time_s(FIELD, max(batch, 1), 1, 1536, self.mhz)
        load = Load(
            streams=streams,
            waiting=demand - streams,
            busy_ratio=busy,
            decode_steps=int(batch > 0),
            decode_rows=batch,
            decode_busy_s=step_s if batch else 0.0,
            tokens=batch,
        )
        reading = None
        if temperature_c is not None:
            reading = Reading("bench", self.now_s, temperature_c, self.mhz)
        return Seen(self.now_s, reading, load)

    def tick(
        self, demand: int, blind: bool = False, ambient_c: float = 30.0, quantum_c: float = 0.1
    ) -> Decision:
        """One second of heat, then one decision."""
        batch = min(demand, 8, self.limits.max_batch)
        power_w = FIELD.power.idle_w
        if batch:
            busy_w = busy_power_w(FIELD, batch, 1, 1536, self.mhz)
            power_w += self.limits.duty * (busy_w - power_w)
        self.heat = replace(self.heat, ambient_c=ambient_c).advance(1.0, power_w)
        self.now_s += 1.0
        temperature_c = None if blind else round(self.heat.temperature_c / quantum_c) * quantum_c
        seen = self.seen(demand, temperature_c)
        self.state, decision = self.step(self.settings, self.levers, self.state, seen)
        self.taken.append((self.now_s, decision))
        self.limits = decision.limits[NPU]
        if decision.frequency_mhz is not None:
            self.mhz = decision.frequency_mhz
        return decision

    def wander(self, seed: int, seconds: int) -> None:
        """Load, weather and the sensor change at random."""
        draw = random.Random(seed)
        demand, ambient_c, blind = 8, 30.0, False
        for _ in range(seconds):
            if draw.random() < 0.05:
                demand = draw.randint(0, 12)
            if draw.random() < 0.02:
                ambient_c = draw.uniform(15, 45)
            if draw.random() < 0.05:
                blind = draw.random() < 0.3
            self.tick(demand, blind, ambient_c)

    def changes_s(self) -> list[float]:
        """When the frequency was changed."""
        pairs = zip(self.taken, self.taken[1:], strict=False)
        return [
            at_s
            for (_, before), (at_s, after) in pairs
            if before.frequency_mhz != after.frequency_mhz
        ]


def order(decision: Decision) -> tuple[float, int, float]:
    """The product order's parts: gear, batch, duty."""
    limits = decision.limits[NPU]
    return decision.frequency_mhz or 0.0, limits.max_batch, limits.duty


def predicted_w(decision: Decision) -> float:
    """What a decision will draw above idle on the true board, everything busy."""
    mhz, batch, duty = order(decision)
    if batch == 0:
        return 0.0
    busy_w = busy_power_w(FIELD, batch, 1, 1536, mhz or FIELD.max_mhz)
    return duty * (busy_w - FIELD.power.idle_w)
