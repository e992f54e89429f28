"""State: the retained topics that tell of this node, and when they are worth publishing again.

Pure but for the clock in `ts`. What is not known is null, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from edged.guard.view import View
from edged.status import Status

EVERY_S = 20.0  # a sensor of a dashboard that says nothing for longer looks dead
_STEP_C = 1.0
_MIB = 1 << 20


def npu(status: Status) -> dict[str, Any]:
    """state/npu."""
    view = status.guard or View()
    reading, forecast = view.reading, view.forecast
    used = view.memory_bytes[0]
    utilization = reading.utilization_ratio if reading else None
    return {
        "temperature_c": view.temperature_c,
        "frequency_mhz": reading.frequency_mhz if reading else None,
        "power_w": _rounded(reading.power_w if reading else None),
        "utilization_pct": None if utilization is None else round(100 * utilization),
        "memory_used_mb": None if used is None else round(used / _MIB),
        "limit_c": view.limit_c or None,
        "mode": status.mode,
        "reason": status.reason,
        "throttle_in_s": _rounded(forecast.throttle_in_s),
        "sustainable_tokens_per_s": _rounded(forecast.sustainable_tokens_per_s),
        "joules_per_token": _rounded(forecast.joules_per_token),
        "idle_c": _rounded(forecast.idle_c),
        "thermal_gain_ratio": _rounded(forecast.gain_ratio),
        "notes": list(view.notes),
    }


def queue(status: Status, generated_tokens: int) -> dict[str, Any]:
    """state/queue."""
    return {
        "waiting": status.waiting,
        "running": status.running,
        "accepting": status.ready,
        "generated_tokens_total": generated_tokens,
    }


def stamped(facts: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    return {**facts, "ts": now.isoformat(timespec="milliseconds").replace("+00:00", "Z")}


@dataclass
class Told:
    """What was published last on one topic, and when."""

    facts: dict[str, Any] | None = None
    at_s: float = 0.0

    def worth(self, facts: dict[str, Any], now_s: float) -> bool:
        """Whether to publish these; remembers them if so."""
        if self.facts is not None and now_s - self.at_s < EVERY_S and not self._differs(facts):
            return False
        self.facts, self.at_s = facts, now_s
        return True

    def _differs(self, facts: dict[str, Any]) -> bool:
        """In what somebody waits for: mode, a whole degree, the queue."""
        assert self.facts is not None
        for name in ("mode", "waiting", "running", "accepting"):
            if self.facts.get(name) != facts.get(name):
                return True
        before, now = self.facts.get("temperature_c"), facts.get("temperature_c")
        if before is None or now is None:
            return before is not now
        return abs(float(now) - float(before)) >= _STEP_C


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
