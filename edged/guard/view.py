"""View: what the guard says of itself at one moment, as words, JSON and figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edged.core import Limits, Mode, Reading
from edged.guard.policy import Forecast, Load
from edged.guard.sensors.hub import SensorState

_GOOD = ("working", "standby")  # standby: read seldom, while a more trusted one works


@dataclass(frozen=True)
class View:
    """What the guard says of itself, for status, metrics and MQTT."""

    mode: Mode = "normal"
    reason: str = "not measured yet"
    limit_c: float = 0.0
    critical_c: float = 0.0
    critical: bool = False
    reading: Reading | None = None
    limits: Mapping[str, Limits] = field(default_factory=dict)
    frequency_mhz: float | None = None
    fan_ratio: float | None = None
    forecast: Forecast = field(default_factory=Forecast)
    load: Load = field(default_factory=Load)
    memory_bytes: tuple[int | None, int | None] = (None, None)  # used, total
    health: str | None = None
    notes: tuple[str, ...] = ()
    sensors: tuple[SensorState, ...] = ()

    @property
    def temperature_c(self) -> float | None:
        return None if self.reading is None else self.reading.temperature_c


def view_json(view: View, now_s: float) -> dict[str, Any]:
    """The `guard` part of /edged/v1/status. now_s: of the clock of Reading.at_s."""
    reading, forecast = view.reading, view.forecast
    used, total = view.memory_bytes
    return {
        "mode": view.mode,
        "reason": view.reason,
        "temperature_c": view.temperature_c,
        "limit_c": view.limit_c,
        "critical_c": view.critical_c,
        "source": reading.source if reading else None,
        "age_s": round(now_s - reading.at_s, 3) if reading else None,
        "frequency_mhz": reading.frequency_mhz if reading else None,
        "power_w": reading.power_w if reading else None,
        "utilization_ratio": reading.utilization_ratio if reading else None,
        "memory_used_bytes": used,
        "memory_total_bytes": total,
        "health": view.health,
        "limits": {name: _limits_json(limits) for name, limits in view.limits.items()},
        "levers": {"frequency_mhz": view.frequency_mhz, "fan_ratio": view.fan_ratio},
        "forecast": {
            "sustainable_tokens_per_s": _rounded(forecast.sustainable_tokens_per_s),
            "throttle_in_s": _rounded(forecast.throttle_in_s),
            "idle_c": _rounded(forecast.idle_c),
            "joules_per_token": _rounded(forecast.joules_per_token),
            "resistance_c_per_w": _rounded(forecast.resistance_c_per_w),
            "gain_ratio": _rounded(forecast.gain_ratio),
        },
        "notes": list(view.notes),
        "sensors": [
            {
                "name": sensor.name,
                "state": sensor.word,
                "problem": sensor.problem,
                "age_s": _rounded(sensor.age_s),
                "in_use": sensor.in_use,
            }
            for sensor in view.sensors
        ],
    }


def _limits_json(limits: Limits) -> dict[str, Any]:
    return {
        "max_batch": limits.max_batch,
        "duty": round(limits.duty, 4),
        "prefill_chunk": limits.prefill_chunk,
        "admit": limits.admit,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def view_figures(view: View, primary: str) -> dict[str, float]:
    """For /metrics, by name; what is not known is left out. primary: the engine that is ruled."""
    reading, forecast = view.reading, view.forecast
    limits = view.limits.get(primary)
    used, total = view.memory_bytes
    found: dict[str, float | None] = {
        "edged_npu_temperature_celsius": view.temperature_c,
        "edged_npu_memory_used_bytes": used,
        "edged_npu_memory_total_bytes": total,
        "edged_guard_limit_celsius": view.limit_c or None,
        "edged_guard_max_batch": limits.max_batch if limits else None,
        "edged_guard_duty_ratio": limits.duty if limits else None,
        "edged_guard_fan_ratio": view.fan_ratio,
        "edged_guard_sustainable_tokens_per_second": forecast.sustainable_tokens_per_s,
        "edged_guard_throttle_in_seconds": forecast.throttle_in_s,
        "edged_guard_idle_celsius": forecast.idle_c,
        "edged_guard_energy_joules_per_token": forecast.joules_per_token,
        "edged_guard_thermal_resistance_celsius_per_watt": forecast.resistance_c_per_w,
        "edged_guard_thermal_gain_ratio": forecast.gain_ratio,
        "edged_guard_sensors_working": float(sum(s.word in _GOOD for s in view.sensors)),
    }
    if reading is not None:
        mhz = reading.frequency_mhz
        found["edged_npu_frequency_hertz"] = None if mhz is None else mhz * 1e6
        found["edged_npu_power_watts"] = reading.power_w
        found["edged_npu_utilization_ratio"] = reading.utilization_ratio
    return {name: float(value) for name, value in found.items() if value is not None}
