"""The base rule: above the limit lower the frequency and shrink the batch; leave slowly. Pure.

Needs no model of the board, so it is also what the model-based policy falls back to. For a given
state the answer is monotone: a hotter reading never gets a higher gear, batch or duty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edged.core import Limits
from edged.guard.policy import CPU, DUTY_FLOOR, NPU, Decision, Levers, Point, Seen, Settings


@dataclass(frozen=True)
class BaseState:
    """gear, batch: indices into the levers' tuples. changed_s: of any step; geared_s: of the last
    frequency change; good_s: of the last plausible reading; critical: what that one said."""

    gear: int
    batch: int
    duty: float = 1.0
    changed_s: float = float("-inf")
    geared_s: float = float("-inf")
    good_s: float = float("-inf")
    critical: bool = False


def start(levers: Levers, now_s: float) -> BaseState:
    """Full speed; a sensor that never speaks counts as hot after its grace."""
    return BaseState(_top_gear(levers), len(levers.batches) - 1, good_s=now_s)


def step(
    settings: Settings, levers: Levers, state: BaseState, seen: Seen
) -> tuple[BaseState, Decision]:
    """One decision. In this order: 1. no reading: hold, after the grace as if urgent 2. critical:
    nothing runs 3. urgent: the lowest of everything 4. hot: one step down per dwell 5. cool for
    long enough: one step up 6. hold."""
    now_s, temperature_c = seen.now_s, seen.temperature_c
    if temperature_c is not None:
        critical = temperature_c >= settings.critical_c
        state = replace(state, good_s=now_s, critical=critical)
    elif now_s - state.good_s > settings.grace_s:  # 1
        return _answer(levers, _lowest(settings, state, now_s), "no plausible temperature: slow")
    else:
        return _answer(levers, state, "no plausible temperature for a moment")
    if state.critical:  # 2
        state = _lowest(settings, state, now_s)
        return _answer(levers, state, f"{temperature_c:.0f} °C is critical")
    if temperature_c > settings.limit_c + settings.urgent_c:  # 3
        state = _lowest(settings, state, now_s)
    elif temperature_c > settings.limit_c:  # 4
        if now_s - state.changed_s >= settings.dwell_s:
            state = _down(settings, levers, state, now_s)
    elif (
        temperature_c < settings.limit_c - settings.hysteresis_c
        and now_s - state.changed_s >= settings.recover_s
    ):  # 5
        state = _up(settings, levers, state, now_s)
    return _answer(levers, state, f"{temperature_c:.0f} °C, limit {settings.limit_c:.0f} °C")


def _down(settings: Settings, levers: Levers, state: BaseState, now_s: float) -> BaseState:
    """One gear and half the batch; the duty only when both are at their lowest."""
    if state.gear == 0 and state.batch == 0:
        return replace(state, duty=max(DUTY_FLOOR, state.duty / 2), changed_s=now_s)
    half = levers.batches[state.batch] / 2
    batch = max((i for i, size in enumerate(levers.batches) if size <= half), default=0)
    state = _geared(settings, state, state.gear - 1, now_s)
    return replace(state, batch=min(batch, state.batch), changed_s=now_s)


def _up(settings: Settings, levers: Levers, state: BaseState, now_s: float) -> BaseState:
    """The way back: duty, then one gear and twice the batch per step."""
    if state.duty < 1.0:
        return replace(state, duty=min(1.0, state.duty * 2), changed_s=now_s)
    if state.gear >= _top_gear(levers) and state.batch >= len(levers.batches) - 1:
        return state
    double = levers.batches[state.batch] * 2
    batch = max(i for i, size in enumerate(levers.batches) if size <= double)
    wider = min(state.batch + 1, len(levers.batches) - 1)  # where sizes more than double
    state = _geared(settings, state, min(state.gear + 1, _top_gear(levers)), now_s)
    return replace(state, batch=max(batch, wider), changed_s=now_s)


def _lowest(settings: Settings, state: BaseState, now_s: float) -> BaseState:
    state = _geared(settings, state, 0, now_s)
    return replace(state, batch=0, duty=DUTY_FLOOR, changed_s=now_s)


def _geared(settings: Settings, state: BaseState, gear: int, now_s: float) -> BaseState:
    """Another gear, unless the dwell of the last change still runs."""
    gear = max(0, gear)
    if gear == state.gear or now_s - state.geared_s < settings.dwell_s:
        return state
    return replace(state, gear=gear, geared_s=now_s)


def _top_gear(levers: Levers) -> int:
    return max(0, len(levers.frequencies_mhz) - 1)


def point_of(levers: Levers, state: BaseState) -> Point:
    mhz = levers.frequencies_mhz[state.gear] if levers.frequencies_mhz else None
    return Point(mhz, levers.batches[state.batch], state.duty)


def _answer(levers: Levers, state: BaseState, why: str) -> tuple[BaseState, Decision]:
    point, critical = point_of(levers, state), state.critical
    full = state.gear == _top_gear(levers) and state.batch == len(levers.batches) - 1
    npu = Limits(0 if critical else point.batch, point.duty, levers.prefill_chunk, not critical)
    cpu = Limits(0 if critical else 64, point.duty, levers.prefill_chunk, not critical)
    if full and state.duty >= 1.0:
        return state, Decision({NPU: npu, CPU: cpu}, point.frequency_mhz, reason=why)
    clock = "" if point.frequency_mhz is None else f"{point.frequency_mhz:.0f} MHz, "
    reason = f"{why}: {clock}batch {npu.max_batch}, duty {point.duty:.2f}"
    return state, Decision({NPU: npu, CPU: cpu}, point.frequency_mhz, None, "throttled", reason)
