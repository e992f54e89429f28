"""What the lab compares ours with: no guard, a bare one, the kernel's governor idea, an oracle.

Every policy is an object with state: `decide(seen)` once per sensor interval. `stack` says which
engine it drives: the unguarded one knows no Limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from edged.core import Limits
from edged.guard.policy import NPU, Decision, Levers, Seen


class LabPolicy(Protocol):
    guarded: bool

    def decide(self, seen: Seen) -> Decision | None:
        """None = leave everything as it is."""


@dataclass
class Constant:
    """The same limits for ever."""

    limits: Limits
    frequency_mhz: float | None = None
    guarded: bool = True

    def decide(self, seen: Seen) -> Decision:
        return Decision({NPU: self.limits}, self.frequency_mhz)


@dataclass
class Nothing:
    """`none`: the chip's own firmware throttle is all there is."""

    guarded: bool = False

    def decide(self, seen: Seen) -> None:
        return None


@dataclass
class FieldGuard:
    """`field-guard`: every 5 s, above the limit set 600 MHz (or the nearest gear below); never
    back up."""

    levers: Levers
    limit_c: float
    guarded: bool = False
    _next_s: float = 0.0

    def decide(self, seen: Seen) -> Decision | None:
        if seen.now_s < self._next_s:
            return None
        self._next_s = seen.now_s + 5.0
        hot = seen.temperature_c is not None and seen.temperature_c > self.limit_c
        gears = [mhz for mhz in self.levers.frequencies_mhz if mhz <= 600]
        return Decision({}, gears[-1]) if hot and gears else None


@dataclass
class StepWise:
    """`step-wise`: the kernel governor's idea. Above the trip point and rising: one cooling
    state more; below trip - hysteresis and falling: one less. States are gears, then batches."""

    levers: Levers
    limit_c: float
    hysteresis_c: float = 2.0
    guarded: bool = True
    _state: int = 0
    _before_c: float = field(default=float("nan"))

    def decide(self, seen: Seen) -> Decision:
        states = _cooling_states(self.levers)
        now_c = seen.temperature_c
        if now_c is not None:
            if now_c >= self.limit_c and not now_c < self._before_c:
                self._state = min(self._state + 1, len(states) - 1)
            elif now_c < self.limit_c - self.hysteresis_c and not now_c > self._before_c:
                self._state = max(self._state - 1, 0)
            self._before_c = now_c
        mhz, batch = states[self._state]
        return Decision({NPU: Limits(batch, 1.0, self.levers.prefill_chunk)}, mhz)


def _cooling_states(levers: Levers) -> list[tuple[float | None, int]]:
    """From full speed to the coolest: frequency first, as a governor would, then the batch."""
    widest = levers.batches[-1]
    gears: list[float | None] = list(reversed(levers.frequencies_mhz)) or [None]
    return [(mhz, widest) for mhz in gears] + [
        (gears[-1], batch) for batch in reversed(levers.batches[:-1])
    ]
