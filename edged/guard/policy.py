"""What a thermal policy is: the words it reads and answers in. Pure; imports core alone.

A policy is a function (state, seen) -> (state, decision). It only emits Limits and lever targets:
which engine serves is not its business. Monotone rules live in base_rule.py and policy_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edged.core import Limits, Mode, Reading

DUTY_FLOOR = 0.05  # streams that run at all keep moving, so that nobody's connection times out
NPU, CPU = "npu", "cpu"


@dataclass(frozen=True)
class Settings:
    """limit_c: min(configured limit, the device's throttle point - margin). critical_c: above it
    nothing runs. itl_slo_s: the longest wanted time between two tokens of one stream.

    hysteresis_c: how far below the limit the base rule begins to recover, in steps of recover_s.
    dwell_s: at most one frequency change within it. urgent_c: above limit + this, everything that
    can be lowered is lowered at once. grace_s: how long a missing sensor is bridged before it
    counts as hot. quiet_fan_ratio: the most the fan may do in quiet hours.
    """

    limit_c: float = 80.0
    critical_c: float = 88.0
    itl_slo_s: float = 1.0
    hysteresis_c: float = 4.0
    dwell_s: float = 10.0
    recover_s: float = 30.0
    urgent_c: float = 3.0
    grace_s: float = 5.0
    fan_min_ratio: float = 0.4
    quiet_fan_ratio: float = 0.5


@dataclass(frozen=True)
class Levers:
    """What can be moved here, found at start. frequencies_mhz: ascending gears, empty = no
    setter. batches: ascending batch sizes worth running; the last is the number of slots."""

    frequencies_mhz: tuple[float, ...] = ()
    batches: tuple[int, ...] = (1, 2, 4, 8)
    fan: bool = False
    prefill_chunk: int = 64


@dataclass(frozen=True)
class Load:
    """What one engine did since the previous decision; sums, not means.

    streams: sequences in its slots now; filling: those whose prompt is not computed yet.
    busy_ratio: share of the time it executed.
    """

    streams: int = 0
    filling: int = 0
    waiting: int = 0
    busy_ratio: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    decode_busy_s: float = 0.0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_busy_s: float = 0.0
    tokens: int = 0

    @property
    def demand(self) -> int:
        """Sequences that want to run."""
        return self.streams + self.waiting


@dataclass(frozen=True)
class Seen:
    """Everything a decision may look at. reading None = nothing plausible came."""

    now_s: float
    reading: Reading | None
    npu: Load = field(default_factory=Load)
    cpu: Load = field(default_factory=Load)
    quiet: bool = False  # quiet hours: the fan stays below quiet_fan_ratio

    @property
    def temperature_c(self) -> float | None:
        return None if self.reading is None else self.reading.temperature_c


@dataclass(frozen=True)
class Point:
    """An operating point: frequency gear (None = no setter), batch, duty."""

    frequency_mhz: float | None
    batch: int
    duty: float


@dataclass(frozen=True)
class Forecast:
    """What the guard expects; None = not known (yet).

    sustainable_tokens_per_s: at the best point under the limit, at the present demand.
    throttle_in_s: until the limit at the present pace; None = not reached at it. idle_c: where
    an idle chip settles. gain_ratio: °C per unit of work over what was first learned here, which
    a blocked fan raises. resistance_c_per_w and joules_per_token need a power reading.
    """

    sustainable_tokens_per_s: float | None = None
    throttle_in_s: float | None = None
    idle_c: float | None = None
    joules_per_token: float | None = None
    resistance_c_per_w: float | None = None
    gain_ratio: float | None = None


@dataclass(frozen=True)
class Decision:
    """limits: per engine name. frequency_mhz and fan_ratio: where the levers should be, None =
    leave it alone."""

    limits: Mapping[str, Limits]
    frequency_mhz: float | None = None
    fan_ratio: float | None = None
    mode: Mode = "normal"
    reason: str = ""
    forecast: Forecast = field(default_factory=Forecast)


def limits_at(point: Point, prefill_chunk: int, admit: bool = True) -> Limits:
    return Limits(point.batch, point.duty, prefill_chunk, admit)


def with_mode(decision: Decision, mode: Mode, reason: str) -> Decision:
    return replace(decision, mode=mode, reason=reason)
