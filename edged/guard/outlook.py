"""Outlook: what the guard tells people: time to the limit, sustainable speed, energy, cooling.

Pure arithmetic on what has been learned. Nothing here influences a decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edged.guard.estimator import HeatInput, HeatModel
from edged.guard.policy import Forecast, Seen

_PART = 0.02  # weight of the newest observation
_LEARNED = 600  # observations after which the gains are the reference of later ones
_REFERENCE = HeatInput(1.0, 0.3)  # a busy chip at full clock with a middling batch
_IDLE_RATIO = 0.02
_LEAST_W = 0.5  # below this a difference of power says nothing about a resistance


@dataclass(frozen=True)
class Outlook:
    """Moving means. None = never measured (many boards report 0.0 W)."""

    observed: int = 0
    busy_w: float | None = None
    idle_w: float | None = None
    tokens_per_s: float = 0.0
    reference_c: float | None = None  # rise at _REFERENCE when it was first learned
    at_s: float = -math.inf


def watched(outlook: Outlook, heat: HeatModel, seen: Seen) -> Outlook:
    """One decision's worth of observations."""
    power_w = None if seen.reading is None else seen.reading.power_w
    observed = outlook.observed + (seen.npu.busy_ratio > _IDLE_RATIO)
    reference_c = outlook.reference_c
    if reference_c is None and observed >= _LEARNED:
        reference_c = heat.now.rise_c(_REFERENCE)
    dt_s = seen.now_s - outlook.at_s
    speed = seen.npu.tokens / dt_s if 0 < dt_s < math.inf else outlook.tokens_per_s
    outlook = replace(
        outlook,
        observed=observed,
        reference_c=reference_c,
        tokens_per_s=outlook.tokens_per_s + _PART * (speed - outlook.tokens_per_s),
        at_s=seen.now_s,
    )
    if not power_w:  # None or 0.0: not measured
        return outlook
    if seen.npu.busy_ratio <= _IDLE_RATIO:
        return replace(outlook, idle_w=_mean(outlook.idle_w, power_w))
    return replace(outlook, busy_w=_mean(outlook.busy_w, power_w))


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _PART * (value - before)


def forecast(
    outlook: Outlook, heat: HeatModel, now: HeatInput, limit_c: float, sustainable: float | None
) -> Forecast:
    """now: what heats at present."""
    joules = None
    if outlook.busy_w is not None and outlook.tokens_per_s > 0.01:
        joules = outlook.busy_w / outlook.tokens_per_s
    resistance = None
    if outlook.busy_w is not None and outlook.idle_w is not None:
        extra_w = outlook.busy_w - outlook.idle_w
        resistance = heat.now.rise_c(now) / extra_w if extra_w > _LEAST_W else None
    ratio = None
    if outlook.reference_c:
        ratio = heat.now.rise_c(_REFERENCE) / outlook.reference_c
    return Forecast(
        sustainable_tokens_per_s=sustainable,
        throttle_in_s=time_to_s(heat, now, limit_c),
        idle_c=heat.now.offset_c,
        joules_per_token=joules,
        resistance_c_per_w=resistance,
        gain_ratio=ratio,
    )


def time_to_s(heat: HeatModel, now: HeatInput, limit_c: float) -> float | None:
    """Seconds until the limit if everything goes on as now; 0 = there, None = never."""
    here_c, end_c = heat.now.temperature_c, heat.now.offset_c + heat.now.rise_c(now)
    if here_c >= limit_c:
        return 0.0
    if end_c <= limit_c:
        return None
    return heat.now.tau_s * math.log((end_c - here_c) / (end_c - limit_c))
