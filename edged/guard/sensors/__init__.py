"""Sensors: where temperatures come from, one file per source. hub.py picks the one that counts.

A source answers with a Raw or raises a SensorError in words. Whether a figure may be believed is
decided in guard/plausible.py. Standard library only: the child processes import this, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from edged.errors import EdgedError

_THRESHOLDS_C = (40.0, 150.0)  # a limit of the device outside of this was misread
_WORD_LENGTH = 32


class SensorError(EdgedError):
    """A source gave nothing; the message tells why and what to do."""


@dataclass(frozen=True)
class Raw:
    """One answer of a source, not judged yet. None = this source does not tell.

    utilization_ratio: of the AI cores, 0..1. throttle_c, reset_c: where the device itself lowers
    its clock and where it resets. health: the driver's word; Alarm is normal on some boards.
    """

    temperature_c: float | None = None
    frequency_mhz: float | None = None
    power_w: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle_c: float | None = None
    reset_c: float | None = None
    health: str | None = None


class Sensor(Protocol):
    name: str

    async def read(self) -> Raw:
        """Raises SensorError; takes no longer than its time-out and a moment."""

    async def stop(self) -> None:
        """Ends its processes; the sensor is not read again."""


def tidied(raw: Raw) -> Raw:
    """Without figures that mean "not measured" or nothing; the temperature stays as it came.

    Boards without a power sensor report 0.0 W.
    """
    total = raw.memory_total_bytes if (raw.memory_total_bytes or 0) > 0 else None
    used = raw.memory_used_bytes
    if used is not None and not 0 <= used <= (total or used):
        used = None
    health = printable(raw.health, _WORD_LENGTH) if raw.health else None
    return Raw(
        temperature_c=raw.temperature_c,
        frequency_mhz=_within(raw.frequency_mhz, 1.0, 1e5),
        power_w=_within(raw.power_w, 1e-3, 1e4),
        utilization_ratio=_within(raw.utilization_ratio, 0.0, 1.0),
        memory_used_bytes=used,
        memory_total_bytes=total,
        throttle_c=_within(raw.throttle_c, *_THRESHOLDS_C),
        reset_c=_within(raw.reset_c, *_THRESHOLDS_C),
        health=health or None,
    )


def _within(value: float | None, low: float, high: float) -> float | None:
    return value if value is not None and math.isfinite(value) and low <= value <= high else None


def printable(text: str, length: int) -> str:
    """One line of at most `length` characters, safe for logs and terminals."""
    words = "".join(c if c.isprintable() else " " for c in text[: 4 * length]).split()
    line = " ".join(words)
    return line if len(line) <= length else line[: length - 1] + "…"
