"""Control: what the guard's decisions are made with, from configuration and the device. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import time

from edged import settings
from edged.guard.policy import NPU, Decision, Levers, Load, Settings, with_mode
from edged.guard.sensors import Raw

CRITICAL_ABOVE_C = 8.0  # over the limit, where the configuration names no critical point
RESET_MARGIN_C = 2.0  # below the device's own reset point nothing may run any more


def settings_of(guard: settings.Guard, device: Raw | None) -> Settings:
    """device: what the sensor in use tells of its own throttle and reset points."""
    limit_c = guard.limit_c
    if device is not None and device.throttle_c is not None:
        limit_c = min(limit_c, device.throttle_c - guard.margin_c)
    critical_c = guard.critical_c or limit_c + CRITICAL_ABOVE_C
    if device is not None and device.reset_c is not None:
        critical_c = min(critical_c, device.reset_c - RESET_MARGIN_C)
    return Settings(
        limit_c=limit_c,
        critical_c=max(critical_c, limit_c),
        itl_slo_s=guard.itl_slo_s,
        hysteresis_c=guard.hysteresis_c,
        dwell_s=guard.dwell_s,
        recover_s=guard.recover_s,
        grace_s=guard.grace_s,
        quiet_fan_ratio=guard.quiet_fan_ratio,
    )


def levers_of(
    batches: Sequence[int],
    prefill_chunk: int,
    frequencies_mhz: tuple[float, ...] = (),
    fan: bool = False,
) -> Levers:
    """batches: the widths the engine's shapes make worth running; 1 always is."""
    return Levers(frequencies_mhz, tuple(sorted({1, *batches})), fan, prefill_chunk)


def quiet_at(hours: str, now: time) -> bool:
    """hours: "22:00-06:00", over midnight or not; "" = never."""
    if not hours:
        return False
    start, _, end = hours.partition("-")
    first, last = time.fromisoformat(start.strip()), time.fromisoformat(end.strip())
    return first <= now < last if first <= last else now >= first or now < last


def at_rest(
    settings: Settings, levers: Levers, decision: Decision, npu: Load, temperature_c: float | None
) -> Decision:
    """The same decision; a cool board without work is not called throttled for a careful duty,
    and whoever comes first need not wait for a wider batch."""
    cool = temperature_c is not None and temperature_c < settings.limit_c - settings.hysteresis_c
    if not cool or npu.demand > 0 or NPU not in decision.limits:
        return decision
    limits = decision.limits[NPU]
    if limits.admit:
        limits = replace(limits, max_batch=max(levers.batches))
    decision = replace(decision, limits={**decision.limits, NPU: limits})
    if decision.mode != "throttled":
        return decision
    return with_mode(decision, "normal", f"{temperature_c:.0f} °C, nothing to do")
