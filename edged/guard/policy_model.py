"""The model-based policy: the fastest operating point that stays under the limit. Pure.

Two speeds: every few seconds it may choose another clock or batch from what it has learned; at
every reading it trims the duty. Without a reading, with a model that explains nothing or above
the critical point the base rule decides. Hotter readings never raise the predicted power.
"""

from __future__ import annotations

from dataclasses import replace

from edged.core import Limits
from edged.guard import base_rule
from edged.guard.estimator import HeatModel
from edged.guard.model_choose import chosen, chunk_of
from edged.guard.model_learn import learned_heat, learned_steps, watch_sensor, with_quantum
from edged.guard.model_state import ModelState, gear_mhz, heat_input, rise_c, target_c
from edged.guard.outlook import forecast, watched
from edged.guard.policy import CPU, DUTY_FLOOR, NPU, Decision, Levers, Seen, Settings

__all__ = ["ModelState", "start", "step"]

_BRAKE = 3.0  # °C taken off the headroom per °C above the target
_PUSH = 0.15  # °C added to it per °C below
_EASE_S, _FAR = 5.0, 0.08  # the duty eases to where it should be, or is there at once if so far
_FULL = 0.99  # from here on full duty is full
_WARM_C, _WARM_STEPS = 0.1, 0.4  # so far above the target, and so many sensor steps: at once
_FAN_STEP, _FAN_UP_S, _FAN_DOWN_S = 0.1, 2.0, 60.0


def start(settings: Settings, levers: Levers, now_s: float) -> ModelState:
    """Begin at the lowest clock and a careful duty: nothing is known yet."""
    return ModelState(
        base=base_rule.start(levers, now_s),
        seen_s=now_s,
        good_s=now_s,
        batch=levers.batches[-1],
        chunk=levers.prefill_chunk,
        fan_ratio=settings.fan_min_ratio,
    )


def step(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen
) -> tuple[ModelState, Decision]:
    """One decision per reading (or per missing one)."""
    temperature_c = seen.temperature_c
    dt_s = max(seen.now_s - state.seen_s, 1e-3)
    state = learned_steps(levers, state, seen, dt_s)
    if temperature_c is not None and state.stuck:
        state = watch_sensor(levers, state, seen, dt_s, temperature_c)
        temperature_c, seen = None, replace(seen, reading=None)
    if temperature_c is None:
        return _blind(settings, levers, state, seen, dt_s)
    if state.heat is None:
        state = replace(state, heat=HeatModel.at(temperature_c))
    state = with_quantum(state, temperature_c)
    state = chosen(settings, levers, state, seen)  # from what was known before this reading
    state = watch_sensor(levers, state, seen, dt_s, temperature_c)
    state = learned_heat(settings, levers, state, seen, dt_s, temperature_c)
    if temperature_c >= settings.critical_c or seen.now_s < state.fallback_s:
        return _by_base_rule(settings, levers, state, seen)
    state = replace(state, base=replace(state.base, critical=False))
    state = _trimmed(settings, levers, state, temperature_c, dt_s)
    state = _with_fan(settings, levers, state, seen)
    return _answer(settings, levers, state, seen, temperature_c)


def _trimmed(
    settings: Settings, levers: Levers, state: ModelState, temperature_c: float, dt_s: float
) -> ModelState:
    """The duty whose steady temperature is the target, less when the chip is above it."""
    assert state.heat is not None
    goal_c = target_c(settings, state)
    headroom_c = goal_c - state.heat.now.offset_c
    error_c = state.heat.now.temperature_c - goal_c
    over_c = max(0.0, error_c - state.swing_c / 2)
    headroom_c -= _BRAKE * over_c + _PUSH * (error_c - over_c)
    full_c = rise_c(levers, state, gear_mhz(levers, state), state.batch)
    aim = min(1.0, max(DUTY_FLOOR, headroom_c / full_c))
    warm = over_c > _WARM_C + _WARM_STEPS * state.quantum_c
    duty = _eased(state.duty, aim, warm, dt_s)
    state = replace(state, full_c=full_c)
    if temperature_c > settings.limit_c + settings.urgent_c or state.hopeless:
        duty = DUTY_FLOOR
    return replace(state, duty=duty)


def _eased(duty: float, aim: float, warm: bool, dt_s: float) -> float:
    """Part of the way to the aim, so that a sensor's steps do not show between two tokens; all
    of it when it is far, and down when the chip is too warm. Never lower for a higher aim."""
    change = aim - duty
    if abs(change) > _FAR * duty or (change < 0 and warm):
        return aim
    if aim >= 1.0 and duty > _FULL:
        return 1.0
    return duty + min(1.0, dt_s / _EASE_S) * change


def _with_fan(settings: Settings, levers: Levers, state: ModelState, seen: Seen) -> ModelState:
    """The fan first: up quickly while heat costs speed, down slowly while it does not."""
    if not levers.fan:
        return state
    most = settings.quiet_fan_ratio if seen.quiet else 1.0
    now_s, ratio = seen.now_s, state.fan_ratio
    hot = state.limited and seen.npu.demand > 0
    if hot and now_s - state.fan_s >= _FAN_UP_S:
        ratio = min(most, ratio + _FAN_STEP)
    elif not hot and now_s - state.fan_s >= _FAN_DOWN_S:
        ratio = max(settings.fan_min_ratio, ratio - _FAN_STEP)
    ratio = min(ratio, most) if ratio > most else ratio
    if ratio == state.fan_ratio:
        return state
    return replace(state, fan_ratio=ratio, fan_s=now_s)


def _answer(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen, temperature_c: float
) -> tuple[ModelState, Decision]:
    assert state.heat is not None
    heat = state.heat
    assert heat is not None  # the caller has seen a reading
    chunk = chunk_of(levers, state, seen.npu)
    cpu_duty = _cpu_duty(settings, state, seen)
    offset_c = heat.now.offset_c
    outlook = watched(state.outlook, heat, seen)
    state = replace(state, chunk=chunk, cpu_duty=cpu_duty, outlook=outlook)
    mhz = gear_mhz(levers, state)
    limits = {
        NPU: Limits(state.batch, state.duty, chunk),
        CPU: Limits(64, cpu_duty, levers.prefill_chunk),
    }
    fan = state.fan_ratio if levers.fan else None
    now = heat_input(levers, state, seen)
    expected = forecast(outlook, heat, now, settings.limit_c, state.sustainable)
    decision = Decision(limits, mhz, fan, forecast=expected)
    where = f"{temperature_c:.0f} °C of {settings.limit_c:.0f} °C"
    clock = f"{mhz:.0f} MHz, " if mhz else ""
    held = f"{clock}batch {state.batch}, duty {state.duty:.2f}"
    if state.hopeless:
        idle = f"idles at {offset_c:.0f} °C"
        reason = f"{where}; the board {idle}: raise the fan or cool the room ({held})"
        return state, replace(decision, mode="throttled", reason=reason)
    if state.limited or state.duty < 1.0:
        return state, replace(decision, mode="throttled", reason=f"{where}: {held}")
    return state, replace(decision, reason=where)


def _cpu_duty(settings: Settings, state: ModelState, seen: Seen) -> float:
    """A CPU engine gives way to a working NPU that heat limits: it makes less of a watt."""
    assert state.heat is not None
    if seen.npu.demand > 0 and state.limited:
        return DUTY_FLOOR
    over_c = state.heat.now.temperature_c - target_c(settings, state)
    return min(1.0, max(DUTY_FLOOR, state.cpu_duty - 0.02 * over_c))


def _blind(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen, dt_s: float
) -> tuple[ModelState, Decision]:
    """No reading: the model bridges the grace without raising anything, then all goes down."""
    if state.heat is not None:
        heat = state.heat.predicted(dt_s, heat_input(levers, state, seen))
        state = replace(state, heat=heat)
    state = replace(state, seen_s=seen.now_s)
    if seen.now_s - state.good_s <= settings.grace_s and not state.base.critical:
        limits = {
            NPU: Limits(state.batch, state.duty, state.chunk),
            CPU: Limits(64, state.cpu_duty, levers.prefill_chunk),
        }
        fan = state.fan_ratio if levers.fan else None
        reason = "no plausible temperature for a moment"
        return state, Decision(limits, gear_mhz(levers, state), fan, "normal", reason)
    return _by_base_rule(settings, levers, state, seen)


def _by_base_rule(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen
) -> tuple[ModelState, Decision]:
    """Hand over where we are, and take over what it answers."""
    nearest = max((i for i, b in enumerate(levers.batches) if b <= state.batch), default=0)
    before = replace(
        state.base,
        gear=state.gear,
        batch=nearest,
        duty=state.duty,
        geared_s=state.geared_s,
        good_s=state.good_s,
    )
    base, decision = base_rule.step(settings, levers, before, seen)
    state = replace(
        state,
        base=base,
        gear=base.gear,
        batch=levers.batches[base.batch],
        duty=base.duty,
        geared_s=base.geared_s,
    )
    fan = (settings.quiet_fan_ratio if seen.quiet else 1.0) if levers.fan else None
    return state, replace(decision, fan_ratio=fan)
