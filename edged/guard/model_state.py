"""ModelState: what the model-based policy remembers between two decisions, and readings of it.

Pure. Who changes it: model_learn.py, model_choose.py and policy_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edged.guard.base_rule import BaseState
from edged.guard.choice import Budget, Gear
from edged.guard.estimator import HeatFilter, HeatInput, HeatModel, StepModel
from edged.guard.outlook import Outlook
from edged.guard.policy import DUTY_FLOOR, Levers, Seen, Settings

_MARGIN_C = 0.15  # below the limit, at least; half a sensor step if that is more
_COARSE = 0.25  # of a sensor step: rounded readings then change between two values, telling most
_RIPPLE, _SMOOTH_C = 0.015, 18.0  # and this share of the rise at full duty, where it is steep


@dataclass(frozen=True)
class ModelState:
    """Everything remembered between two decisions."""

    base: BaseState
    seen_s: float
    heat: HeatModel | None = None
    steps: StepModel = field(default_factory=StepModel)
    gear: int = 0
    batch: int = 1
    widen_s: float = math.inf  # when a wider batch is tried again
    widen_wait_s: float = 60.0
    duty: float = DUTY_FLOOR
    full_c: float = 0.0  # rise at duty 1 of the present point
    geared_s: float = float("-inf")
    budget: Budget = field(default_factory=Budget)
    rethink_s: float = float("-inf")
    good_s: float = 0.0
    demand: float = 0.0  # decaying peak
    margin_c: float = 0.0  # on top of the least one
    quantum_c: float = 1.0
    swing_c: float = 0.0  # from the end of a pause to the end of a step
    x: float = 0.0  # highest gear / clock at the last reading; 0 = none yet
    settled_s: float = 0.0  # when the clock was last seen to change
    visited_s: Mapping[int, float] = field(default_factory=dict)  # gear -> when it was last in use
    mix_per_step: float = 0.0  # prompt tokens per decode step
    fullness: float = 1.0  # share of work seen over that of full batches
    chunk: int = 0
    fallback_s: float = float("-inf")  # until when the base rule decides
    hopeless: bool = False  # even the lowest point is above the limit
    limited: bool = False  # heat costs speed
    sustainable: float | None = None  # tokens/s of the best point
    cpu_ratio: float = 0.0
    cpu_duty: float = 1.0
    fan_ratio: float = 0.0
    fan_s: float = float("-inf")
    same_c: float = math.nan  # the value the sensor has shown for some time ...
    anchor: HeatFilter | None = None  # ... what was known when that began ...
    expected_c: float = math.nan  # ... and where the chip should be by now
    stuck: bool = False
    outlook: Outlook = field(default_factory=Outlook)


def clock_ratio(levers: Levers, seen: Seen, state: ModelState) -> float:
    """Highest gear / present clock; 1 where there is no gear to choose and none is reported."""
    reading = seen.reading
    mhz = None if reading is None else reading.frequency_mhz
    top = levers.frequencies_mhz[-1] if levers.frequencies_mhz else mhz
    if mhz is None and levers.frequencies_mhz:
        mhz = levers.frequencies_mhz[state.gear]
    return top / mhz if top and mhz else 1.0


def heat_input(levers: Levers, state: ModelState, seen: Seen) -> HeatInput:
    """What warmed the chip since the last decision, in the model's units."""
    load, x = seen.npu, clock_ratio(levers, seen, state)
    batch = load.decode_rows / load.decode_steps if load.decode_steps else load.streams
    busy_s = load.decode_busy_s + load.prefill_busy_s
    filling = load.prefill_busy_s / busy_s if busy_s > 0 else 0.0
    share = (1 - filling) * state.steps.share(batch, x)
    share += filling * state.steps.share(max(load.streams, 1), x)
    return HeatInput(load.busy_ratio / x, load.busy_ratio * share / (x * x))


def gear_mhz(levers: Levers, state: ModelState) -> Gear:
    return levers.frequencies_mhz[state.gear] if levers.frequencies_mhz else None


def rise_c(levers: Levers, state: ModelState, gear: Gear, batch: int) -> float:
    assert state.heat is not None
    x = levers.frequencies_mhz[-1] / gear if gear else 1.0
    share = state.steps.share(batch, x) * state.fullness
    return state.heat.now.rise_c(HeatInput(1 / x, share / (x * x)))


def target_c(settings: Settings, state: ModelState) -> float:
    margin_c = max(_MARGIN_C, _COARSE * state.quantum_c) + state.margin_c
    return settings.limit_c - margin_c - _RIPPLE * max(0.0, state.full_c - _SMOOTH_C)
