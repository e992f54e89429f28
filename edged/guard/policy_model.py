"""The model-based policy: the fastest operating point that stays under the limit. Pure.

Two speeds: every few seconds it may choose another clock or batch from what it has learned; at
every reading it trims the duty. Without a reading, with a model that explains nothing or above
the critical point the base rule decides. Hotter readings never raise the predicted power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from edged.core import Limits
from edged.guard import base_rule, choice
from edged.guard.base_rule import BaseState
from edged.guard.choice import Budget, Gear, Option
from edged.guard.estimator import HeatInput, HeatModel, StepModel
from edged.guard.policy import (
    CPU,
    DUTY_FLOOR,
    NPU,
    Decision,
    Forecast,
    Levers,
    Load,
    Seen,
    Settings,
)

RETHINK_S = 5.0  # between two choices of clock and batch
GAIN = 1.03  # a new batch must promise this much more
_MARGIN_C = 0.15  # below the limit, at least; half a sensor step if that is more
_COARSE = 0.3  # of a sensor step: rounded readings then change between two values, which tells most
_MARGIN_MOST_C = 1.5
_RIPPLE, _SMOOTH_C = 0.015, 18.0  # and this share of the rise at full duty, where it is steep
_OVER_STEP_C, _UNDER_STEP_C = 0.02, 0.0001  # margin's walk: over the limit 0.5 % of the time
_BRAKE = 1.5  # °C taken off the headroom per °C above the target
_PUSH = 0.3  # °C added to it per °C below
_MISFIT_MOST = 12.0  # squared surprise, in expected ones, at which the model explains nothing
_FALLBACK_S = 120.0
_CPU_SHIFT_C = 8.0  # what a busy CPU engine adds until it has been learned
_SETTLE_S = 2.5  # after a clock change what is measured belongs to both clocks
_UNSETTLED_C2 = 1.0  # so a reading then says little (variance, °C^2)
_PACE_GRACE = 1.1  # a pace kept so far may be this much too slow before it is given up
_FAN_STEP, _FAN_UP_S, _FAN_DOWN_S = 0.1, 2.0, 60.0


@dataclass(frozen=True)
class ModelState:
    """Everything remembered between two decisions."""

    base: BaseState
    seen_s: float
    heat: HeatModel | None = None
    steps: StepModel = field(default_factory=StepModel)
    gear: int = 0
    batch: int = 1
    duty: float = DUTY_FLOOR
    full_c: float = 0.0  # rise at duty 1 of the present point
    geared_s: float = float("-inf")
    budget: Budget = field(default_factory=Budget)
    rethink_s: float = float("-inf")
    good_s: float = 0.0
    demand: float = 0.0  # decaying peak
    margin_c: float = 0.0  # on top of the least one
    quantum_c: float = 1.0
    x: float = 0.0  # highest gear / clock at the last reading; 0 = none yet
    settled_s: float = 0.0  # when the clock was last seen to change
    mix_per_step: float = 0.0  # prompt tokens per decode step
    fullness: float = 1.0  # share of work seen over that of full batches
    chunk: int = 0
    fallback_s: float = float("-inf")  # until when the base rule decides
    hopeless: bool = False  # even the lowest point is above the limit
    limited: bool = False  # heat costs speed
    cpu_ratio: float = 0.0
    cpu_duty: float = 1.0
    fan_ratio: float = 0.0
    fan_s: float = float("-inf")
    forecast: Forecast = field(default_factory=Forecast)


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
    state = _learned_steps(levers, state, seen, dt_s)
    if temperature_c is None:
        return _blind(settings, levers, state, seen, dt_s)
    if state.heat is None:
        state = replace(state, heat=HeatModel.at(temperature_c))
    state = _quantum(state, temperature_c)
    state = _chosen(settings, levers, state, seen)  # from what was known before this reading
    state = _learned_heat(settings, levers, state, seen, dt_s, temperature_c)
    if temperature_c >= settings.critical_c or seen.now_s < state.fallback_s:
        return _by_base_rule(settings, levers, state, seen)
    state = _trimmed(settings, levers, state, temperature_c)
    state = _with_fan(settings, levers, state, seen)
    return _answer(settings, levers, state, seen, temperature_c)


# --- learning ------------------------------------------------------------------------------------


def _x(levers: Levers, seen: Seen, state: ModelState) -> float:
    """Highest gear / present clock; 1 where there is no gear to choose and none is reported."""
    reading = seen.reading
    mhz = None if reading is None else reading.frequency_mhz
    top = levers.frequencies_mhz[-1] if levers.frequencies_mhz else mhz
    if mhz is None and levers.frequencies_mhz:
        mhz = levers.frequencies_mhz[state.gear]
    return top / mhz if top and mhz else 1.0


def _learned_steps(levers: Levers, state: ModelState, seen: Seen, dt_s: float) -> ModelState:
    load, x = seen.npu, _x(levers, seen, state)
    if x != state.x:
        state = replace(state, x=x, settled_s=seen.now_s)
    steps, mix = state.steps, state.mix_per_step
    settled = _settled(state, seen)
    if load.decode_steps > 0:
        mean = load.decode_rows / load.decode_steps
        if settled:
            steps = steps.seen(mean, x, load.decode_busy_s / load.decode_steps)
        mix += 0.02 * load.decode_steps * (load.prefill_tokens / load.decode_steps - mix)
    if load.prefill_steps > 0 and settled:
        mean = load.prefill_tokens / load.prefill_steps
        steps = steps.seen_chunks(mean, x, load.prefill_busy_s / load.prefill_steps)
    demand = max(float(load.demand), state.demand * math.exp(-dt_s / 60.0))
    return replace(state, steps=steps, mix_per_step=mix, demand=demand)


def _settled(state: ModelState, seen: Seen) -> bool:
    """The clock has been the same for a while (or has never changed)."""
    return seen.now_s - max(state.settled_s, state.geared_s) >= _SETTLE_S


def _heat_input(levers: Levers, state: ModelState, seen: Seen) -> HeatInput:
    """What warmed the chip since the last decision, in the model's units."""
    load, x = seen.npu, _x(levers, seen, state)
    batch = load.decode_rows / load.decode_steps if load.decode_steps else load.streams
    busy_s = load.decode_busy_s + load.prefill_busy_s
    filling = load.prefill_busy_s / busy_s if busy_s > 0 else 0.0
    share = (1 - filling) * state.steps.share(batch, x)
    share += filling * state.steps.share(max(load.streams, 1), x)
    return HeatInput(load.busy_ratio / x, load.busy_ratio * share / (x * x))


def _quantum(state: ModelState, temperature_c: float) -> ModelState:
    """Sensors that tell tenths are told from those that tell whole degrees by their readings."""
    if state.quantum_c > 0.1 and abs(temperature_c - round(temperature_c)) > 0.01:
        return replace(state, quantum_c=0.1)
    return state


def _learned_heat(
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
    heat_input = _heat_input(levers, state, seen)
    heat = heat.predicted(dt_s, heat_input).corrected(temperature_c, noise)
    over = temperature_c > settings.limit_c
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
        fullness=_fullness(levers, state, seen, heat_input),
        margin_c=min(max(margin_c, 0.0), _MARGIN_MOST_C),
        fallback_s=fallback_s,
    )


def _fullness(levers: Levers, state: ModelState, seen: Seen, heat: HeatInput) -> float:
    """Batches are not always full: a slot whose prompt is computed sits out the decode steps."""
    x, ratio = _x(levers, seen, state), seen.npu.busy_ratio
    full = state.steps.share(min(state.batch, seen.npu.demand), x)
    if ratio < DUTY_FLOOR or full <= 0:
        return state.fullness
    seen_now = min(1.5, heat.work * x * x / ratio / full)
    return state.fullness + 0.02 * (seen_now - state.fullness)


# --- choosing ------------------------------------------------------------------------------------


def _target_c(settings: Settings, state: ModelState) -> float:
    margin_c = max(_MARGIN_C, _COARSE * state.quantum_c) + state.margin_c
    return settings.limit_c - margin_c - _RIPPLE * max(0.0, state.full_c - _SMOOTH_C)


def _rise_c(levers: Levers, state: ModelState, gear: Gear, batch: int) -> float:
    assert state.heat is not None
    x = levers.frequencies_mhz[-1] / gear if gear else 1.0
    share = state.steps.share(batch, x) * state.fullness
    return state.heat.now.rise_c(HeatInput(1 / x, share / (x * x)))


def _options(settings: Settings, levers: Levers, state: ModelState, demand: int) -> list[Option]:
    assert state.heat is not None  # the caller has seen a reading
    top = levers.frequencies_mhz[-1] if levers.frequencies_mhz else None
    chunks_per_row = state.mix_per_step / max(1.0, state.demand) / max(1, state.chunk)

    def x_of(gear: Gear) -> float:
        return top / gear if top and gear else 1.0

    plant = choice.Plant(
        step_s=lambda gear, batch: state.steps.step_s(batch, x_of(gear)),
        rise_c=lambda gear, batch: _rise_c(levers, state, gear, batch),
        prefill_s=lambda gear: chunks_per_row * state.steps.chunk_s(state.chunk, x_of(gear)),
    )
    headroom_c = _target_c(settings, state) - state.heat.now.offset_c
    return choice.options(plant, choice.gears_of(levers), levers.batches, demand, headroom_c)


def _chosen(settings: Settings, levers: Levers, state: ModelState, seen: Seen) -> ModelState:
    """Perhaps another clock and batch. A better batch costs nothing; a better clock must be
    worth a change and within the budget; a hopeless board goes to its lowest at once."""
    now_s = seen.now_s
    arrived = seen.npu.demand > state.demand - 0.5 and seen.npu.demand != state.batch
    if now_s < state.rethink_s and not arrived:
        return state
    state = replace(state, rethink_s=now_s + RETHINK_S)
    demand = max(1, round(state.demand))
    found = _options(settings, levers, state, demand)
    lowest = min(found, key=lambda o: (o.point.frequency_mhz or 0.0, o.point.batch))
    state = _hopeless(settings, levers, state, lowest)
    here = [o for o in found if o.point.frequency_mhz == _gear_mhz(levers, state)]
    stay = _steady_batch(settings, state, here)
    go = lowest if state.hopeless else choice.best(found, settings.itl_slo_s)
    full = max(o.tokens_per_s / o.point.duty for o in found)
    state = replace(state, limited=go.tokens_per_s < 0.98 * full)
    if _worth(settings, state, stay, go, now_s) and go.point.frequency_mhz is not None:
        gear = levers.frequencies_mhz.index(go.point.frequency_mhz)
        if gear == state.gear:
            return replace(state, batch=go.point.batch)
        budget = state.budget.spent(now_s)
        return replace(state, gear=gear, batch=go.point.batch, geared_s=now_s, budget=budget)
    return replace(state, batch=lowest.point.batch if state.hopeless else stay.point.batch)


def _steady_batch(settings: Settings, state: ModelState, here: list[Option]) -> Option:
    """The best batch at the present clock; the present one unless another is clearly better."""
    found = choice.best(here, settings.itl_slo_s)
    now = next((o for o in here if o.point.batch == state.batch), found)
    same = _keeps(settings, now) or found.pace_s > settings.itl_slo_s
    return now if same and found.tokens_per_s < GAIN * now.tokens_per_s else found


def _keeps(settings: Settings, now: Option) -> bool:
    """The present point is fast enough, with some grace so that it is not left at a whim."""
    return now.pace_s <= _PACE_GRACE * settings.itl_slo_s


def _hopeless(settings: Settings, levers: Levers, state: ModelState, lowest: Option) -> ModelState:
    """Even the lowest point does not fit (with some hysteresis)."""
    assert state.heat is not None
    headroom_c = _target_c(settings, state) - state.heat.now.offset_c
    full_c = lowest.rise_c / lowest.point.duty
    if state.hopeless:
        return replace(state, hopeless=headroom_c < 0.2 * full_c + 0.5)
    return replace(state, hopeless=headroom_c < DUTY_FLOOR * full_c)


def _worth(settings: Settings, state: ModelState, stay: Option, go: Option, now_s: float) -> bool:
    if now_s - state.geared_s < settings.dwell_s:
        return False
    if state.hopeless:
        return True
    within = go.pace_s <= settings.itl_slo_s
    if _keeps(settings, stay):
        gain = go.tokens_per_s / stay.tokens_per_s if within else 0.0
    else:
        gain = math.inf if within else stay.pace_s / go.pace_s
    return state.budget.worth(gain, now_s)


def _gear_mhz(levers: Levers, state: ModelState) -> Gear:
    return levers.frequencies_mhz[state.gear] if levers.frequencies_mhz else None


# --- trimming ------------------------------------------------------------------------------------


def _trimmed(
    settings: Settings, levers: Levers, state: ModelState, temperature_c: float
) -> ModelState:
    """The duty whose steady temperature is the target, less when the chip is above it."""
    assert state.heat is not None
    target_c = _target_c(settings, state)
    headroom_c = target_c - state.heat.now.offset_c
    error_c = state.heat.now.temperature_c - target_c
    headroom_c -= (_BRAKE if error_c > 0 else _PUSH) * error_c
    full_c = _rise_c(levers, state, _gear_mhz(levers, state), state.batch)
    duty = min(1.0, max(DUTY_FLOOR, headroom_c / full_c))
    state = replace(state, full_c=full_c)
    if temperature_c > settings.limit_c + settings.urgent_c or state.hopeless:
        duty = DUTY_FLOOR
    return replace(state, duty=duty)


def _chunk(levers: Levers, state: ModelState, load: Load) -> int:
    """As small as keeps up with the prompts that arrive, so that a chunk is a small part of a
    step; larger when most streams wait for their first token."""
    if state.steps.chunk is None:
        return levers.prefill_chunk
    gear = _gear_mhz(levers, state)
    x = levers.frequencies_mhz[-1] / gear if gear else 1.0
    steps = state.steps
    step_s = steps.step_s(max(1, min(state.batch, load.streams)), x)
    arriving = 1.1 * state.mix_per_step
    if 2 * load.filling > load.streams:
        return levers.prefill_chunk
    return choice.chunk_tokens(
        lambda size: steps.chunk_s(size, x), step_s, arriving, levers.prefill_chunk
    )


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


# --- answers -------------------------------------------------------------------------------------


def _answer(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen, temperature_c: float
) -> tuple[ModelState, Decision]:
    assert state.heat is not None
    assert state.heat is not None  # the caller has seen a reading
    chunk = _chunk(levers, state, seen.npu)
    cpu_duty = _cpu_duty(settings, state, seen)
    offset_c = state.heat.now.offset_c
    state = replace(state, chunk=chunk, cpu_duty=cpu_duty)
    mhz = _gear_mhz(levers, state)
    limits = {
        NPU: Limits(state.batch, state.duty, chunk),
        CPU: Limits(64, cpu_duty, levers.prefill_chunk),
    }
    fan = state.fan_ratio if levers.fan else None
    decision = Decision(limits, mhz, fan)
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
    over_c = state.heat.now.temperature_c - _target_c(settings, state)
    return min(1.0, max(DUTY_FLOOR, state.cpu_duty - 0.02 * over_c))


def _blind(
    settings: Settings, levers: Levers, state: ModelState, seen: Seen, dt_s: float
) -> tuple[ModelState, Decision]:
    """No reading: the model bridges the grace without raising anything, then all goes down."""
    if state.heat is not None:
        heat = state.heat.predicted(dt_s, _heat_input(levers, state, seen))
        state = replace(state, heat=heat)
    state = replace(state, seen_s=seen.now_s)
    if seen.now_s - state.good_s <= settings.grace_s:
        limits = {
            NPU: Limits(state.batch, state.duty, state.chunk),
            CPU: Limits(64, state.cpu_duty, levers.prefill_chunk),
        }
        fan = state.fan_ratio if levers.fan else None
        reason = "no plausible temperature for a moment"
        return state, Decision(limits, _gear_mhz(levers, state), fan, "normal", reason)
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
