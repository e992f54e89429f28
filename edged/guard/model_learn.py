"""Learning: steps, heat and the sensor's honesty -> the next ModelState. Pure; decides nothing."""

from __future__ import annotations

import math
from dataclasses import replace

from edged.guard.estimator import HeatInput, HeatModel
from edged.guard.model_state import ModelState, clock_ratio, heat_input
from edged.guard.policy import DUTY_FLOOR, Levers, Seen, Settings

_MARGIN_MOST_C = 1.5
_OVER_STEP_C, _UNDER_STEP_C = 0.03, 0.0001  # margin's walk: over the limit 0.3 % of the time
_MIX_PART = 0.01  # weight of one decode step in the mean of prompt tokens per decode step
_MISFIT_MOST = 12.0  # squared surprise, in expected ones, at which the model explains nothing
_FALLBACK_S = 120.0
_CPU_SHIFT_C = 8.0  # what a busy CPU engine adds until it has been learned
_STUCK_C = 3.0  # plus a sensor step: a reading that did not follow by so much is stuck
_MATURE = 60  # busy observations before the model may call a sensor stuck
_SWING_FREE_C = 0.25  # half a swing up to this stays below the limit, more of it may rise above
_VISIT_S = 30.0  # a clock kept for so long is known
_PERIOD_MOST_S = 2.0  # between two decode steps
_SETTLE_S = 2.5  # after a clock change what is measured belongs to both clocks
_UNSETTLED_C2 = 1.0  # so a reading then says little (variance, °C^2)


def learned_steps(levers: Levers, state: ModelState, seen: Seen, dt_s: float) -> ModelState:
    load, x = seen.npu, clock_ratio(levers, seen, state)
    if x != state.x:
        state = replace(state, x=x, settled_s=seen.now_s)
    if seen.now_s - state.settled_s >= _VISIT_S:
        state = replace(state, visited_s={**state.visited_s, state.gear: seen.now_s})
    steps, mix = state.steps, state.mix_per_step
    settled = _settled(state, seen)
    if load.decode_steps > 0:
        mean = load.decode_rows / load.decode_steps
        if settled:
            steps = steps.seen(mean, x, load.decode_busy_s / load.decode_steps)
        mix += min(1.0, _MIX_PART * load.decode_steps) * (
            load.prefill_tokens / load.decode_steps - mix
        )
    if load.prefill_steps > 0 and settled:
        mean = load.prefill_tokens / load.prefill_steps
        steps = steps.seen_chunks(mean, x, load.prefill_busy_s / load.prefill_steps)
    demand = max(float(load.demand), state.demand * math.exp(-dt_s / 60.0))
    return replace(state, steps=steps, mix_per_step=mix, demand=demand)


def _settled(state: ModelState, seen: Seen) -> bool:
    """The clock has been the same for a while (or has never changed)."""
    return seen.now_s - max(state.settled_s, state.geared_s) >= _SETTLE_S


def with_quantum(state: ModelState, temperature_c: float) -> ModelState:
    """Sensors that tell tenths are told from those that tell whole degrees by their readings."""
    if state.quantum_c > 0.1 and abs(temperature_c - round(temperature_c)) > 0.01:
        return replace(state, quantum_c=0.1)
    return state


def learned_heat(
    settings: Settings,
    levers: Levers,
    state: ModelState,
    seen: Seen,
    dt_s: float,
    temperature_c: float,
) -> ModelState:
    assert state.heat is not None  # the caller has seen a reading
    heat = state.heat
    cpu_ratio = seen.cpu.busy_ratio
    if abs(cpu_ratio - state.cpu_ratio) > 0.2:
        heat = heat.shifted((cpu_ratio - state.cpu_ratio) * _CPU_SHIFT_C)
    else:
        cpu_ratio = state.cpu_ratio
    noise = state.quantum_c**2 / 12 + (0.0025 if _settled(state, seen) else _UNSETTLED_C2)
    swing_c = _swing_c(state, seen, dt_s)
    noise += swing_c * swing_c / 12
    if state.settled_s == seen.now_s:
        heat = heat.stirred()
    warmed = heat_input(levers, state, seen)
    heat = heat.predicted(dt_s, warmed).corrected(temperature_c, noise)
    over = temperature_c > settings.limit_c + max(0.0, swing_c / 2 - _SWING_FREE_C)
    margin_c = state.margin_c + (_OVER_STEP_C if over else -_UNDER_STEP_C) * dt_s
    fallback_s = state.fallback_s
    if heat.now.misfit > _MISFIT_MOST:
        fallback_s = seen.now_s + _FALLBACK_S
        heat = HeatModel.at(temperature_c)
    return replace(
        state,
        heat=heat,
        seen_s=seen.now_s,
        good_s=seen.now_s,
        cpu_ratio=cpu_ratio,
        swing_c=swing_c,
        fullness=_fullness(levers, state, seen, warmed),
        margin_c=min(max(margin_c, 0.0), _MARGIN_MOST_C),
        fallback_s=fallback_s,
    )


def _swing_c(state: ModelState, seen: Seen, dt_s: float) -> float:
    """°C from the end of a pause to the end of a step; a reading may fall anywhere between."""
    assert state.heat is not None
    period_s = min(dt_s, _PERIOD_MOST_S) / max(1, seen.npu.decode_steps)
    return state.full_c * state.duty * (1 - state.duty) * period_s / state.heat.now.tau_s


def _fullness(levers: Levers, state: ModelState, seen: Seen, heat: HeatInput) -> float:
    """Batches are not always full: a slot whose prompt is computed sits out the decode steps."""
    x, ratio = clock_ratio(levers, seen, state), seen.npu.busy_ratio
    full = state.steps.share(min(state.batch, seen.npu.demand), x)
    if ratio < DUTY_FLOOR or full <= 0:
        return state.fullness
    seen_now = min(1.5, heat.work * x * x / ratio / full)
    return state.fullness + 0.02 * (seen_now - state.fullness)


def watch_sensor(
    levers: Levers, state: ModelState, seen: Seen, dt_s: float, temperature_c: float
) -> ModelState:
    """A value that stays while the chip must have moved is stuck; it counts as none from the
    next decision on, until it changes."""
    assert state.heat is not None  # the caller has seen a reading
    if temperature_c != state.same_c or state.anchor is None:
        return replace(
            state,
            same_c=temperature_c,
            anchor=state.heat.now,
            expected_c=temperature_c,
            stuck=False,
        )
    heat = heat_input(levers, state, seen)
    expected_c = state.anchor.drifted_c(state.expected_c, dt_s, heat)
    off = abs(expected_c - temperature_c) > _STUCK_C + state.quantum_c
    stuck = off and state.outlook.observed > _MATURE
    return replace(state, expected_c=expected_c, stuck=stuck or state.stuck)
