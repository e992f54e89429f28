"""Choosing: clock and batch every few seconds, from what was known before the present reading.

Pure. A better batch costs nothing; a better clock must be worth one of the changes that are left.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edged.guard import choice
from edged.guard.choice import Gear, Option
from edged.guard.model_state import ModelState, gear_mhz, rise_c, target_c
from edged.guard.policy import DUTY_FLOOR, Levers, Load, Seen, Settings

RETHINK_S = 5.0  # between two choices of clock and batch
GAIN = 1.03  # a new batch must promise this much more
_HOPELESS_C, _STAYS_C = 2.0, 2.6  # headroom below which the board counts as too hot by itself
_WIDEN_FIRST_S, _WIDEN_MOST_S = 60.0, 3600.0  # between trials of a wider batch
_TRIAL_SHARE = 0.9  # of the present speed an untried clock must promise to be tried
_TRIAL_AFTER_S, _TRIAL_EVERY_S = 60.0, 7200.0
_KEEP_UP = 1.01  # prompts are taken in this much faster than they arrive
_PACE_GRACE = 1.1  # a pace kept so far may be this much too slow before it is given up


def chosen(settings: Settings, levers: Levers, state: ModelState, seen: Seen) -> ModelState:
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
    here = [o for o in found if o.point.frequency_mhz == gear_mhz(levers, state)]
    stay = _steady_batch(settings, state, here)
    fitting = [o for o in found if o.point.duty > DUTY_FLOOR] or [lowest]
    go = lowest if state.hopeless else choice.best(fitting, settings.itl_slo_s)
    full = max(o.tokens_per_s / o.point.duty for o in found)
    state = replace(state, limited=go.tokens_per_s < 0.98 * full, sustainable=go.tokens_per_s)
    if not _worth(settings, state, stay, go, now_s) or go.point.frequency_mhz is None:
        trial = _trial(settings, levers, state, found, stay, now_s)
        if trial is None:
            return _batched(levers, state, lowest if state.hopeless else stay, demand, now_s)
        go = trial
    gear = levers.frequencies_mhz.index(go.point.frequency_mhz)
    if gear == state.gear:
        return replace(state, batch=go.point.batch)
    budget = state.budget.spent(now_s)
    return replace(state, gear=gear, batch=go.point.batch, geared_s=now_s, budget=budget)


def _trial(
    settings: Settings,
    levers: Levers,
    state: ModelState,
    found: list[Option],
    stay: Option,
    now_s: float,
) -> Option | None:
    """A neighbouring clock that has not been tried for long and may be about as good: what is
    believed of it is a guess, and a wrong guess would never be noticed. A higher one only where
    no duty is held back: there it is the way to the heat that is left."""
    if state.hopeless or not state.limited or not state.budget.ample(now_s):
        return None
    if now_s - state.geared_s < _TRIAL_AFTER_S:
        return None
    near = [state.gear - 1, state.gear + 1] if stay.point.duty >= 1.0 else [state.gear - 1]
    untried = [
        levers.frequencies_mhz[gear]
        for gear in near
        if 0 <= gear < len(levers.frequencies_mhz)
        and now_s - state.visited_s.get(gear, -math.inf) >= _TRIAL_EVERY_S
    ]
    fair = [
        option
        for option in found
        if option.point.frequency_mhz in untried
        and option.pace_s <= settings.itl_slo_s
        and option.tokens_per_s > _TRIAL_SHARE * stay.tokens_per_s
    ]
    return choice.best(fair, settings.itl_slo_s) if fair else None


def _options(settings: Settings, levers: Levers, state: ModelState, demand: int) -> list[Option]:
    assert state.heat is not None  # the caller has seen a reading
    top = levers.frequencies_mhz[-1] if levers.frequencies_mhz else None
    chunks_per_row = state.mix_per_step / max(1.0, state.demand) / max(1, state.chunk)

    def x_of(gear: Gear) -> float:
        return top / gear if top and gear else 1.0

    plant = choice.Plant(
        step_s=lambda gear, batch: state.steps.step_s(batch, x_of(gear)),
        rise_c=lambda gear, batch: rise_c(levers, state, gear, batch),
        prefill_s=lambda gear: chunks_per_row * state.steps.chunk_s(state.chunk, x_of(gear)),
    )
    headroom_c = target_c(settings, state) - state.heat.now.offset_c
    return choice.options(plant, choice.gears_of(levers), levers.batches, demand, headroom_c)


def _batched(
    levers: Levers, state: ModelState, stay: Option, demand: int, now_s: float
) -> ModelState:
    """The batch of `stay`; now and then the widest that is asked for, where that is wider. Its
    steps are only seen while it runs: one that was slow for a while would never be seen to be
    fast again. The more often it was no better, the rarer it is tried."""
    batch = stay.point.batch
    widest = max((b for b in levers.batches if b <= demand), default=levers.batches[0])
    if state.hopeless or batch >= widest:
        return replace(state, batch=batch, widen_wait_s=_WIDEN_FIRST_S, widen_s=math.inf)
    if state.widen_s == math.inf:  # it has just become narrower
        return replace(state, batch=batch, widen_s=now_s + state.widen_wait_s)
    if now_s < state.widen_s:
        return replace(state, batch=batch)
    wait_s = min(2 * state.widen_wait_s, _WIDEN_MOST_S)
    return replace(state, batch=widest, widen_wait_s=wait_s, widen_s=now_s + wait_s)


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
    """An idle chip leaves so little headroom that nothing sensible fits (with hysteresis)."""
    assert state.heat is not None
    headroom_c = target_c(settings, state) - state.heat.now.offset_c
    full_c = lowest.rise_c / lowest.point.duty
    least_c = max(_STAYS_C, 0.2 * full_c + 0.5) if state.hopeless else _HOPELESS_C
    return replace(state, hopeless=headroom_c < max(least_c, DUTY_FLOOR * full_c))


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


def chunk_of(levers: Levers, state: ModelState, load: Load) -> int:
    """As small as keeps up with the prompts that arrive, so that a chunk is a small part of a
    step; larger when most streams wait for their first token."""
    if state.steps.chunk is None:
        return levers.prefill_chunk
    gear = gear_mhz(levers, state)
    x = levers.frequencies_mhz[-1] / gear if gear else 1.0
    steps = state.steps
    step_s = steps.step_s(max(1, min(state.batch, load.streams)), x)
    arriving = _KEEP_UP * state.mix_per_step
    if 2 * load.filling > load.streams:
        return levers.prefill_chunk
    return choice.chunk_tokens(
        lambda size: steps.chunk_s(size, x), step_s, arriving, levers.prefill_chunk
    )
