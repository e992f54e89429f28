"""What the lab compares ours with: no guard, a bare one, the kernel's governor idea, an oracle.

Every policy is an object with state: `decide(seen)` once per sensor interval. `stack` says which
engine it drives: the unguarded one knows no Limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from edged.core import Limits
from edged.guard import base_rule, policy_model
from edged.guard.plausible import Filter, believed
from edged.guard.policy import NPU, Decision, Levers, Seen, Settings


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


def plausible(state: Filter, seen: Seen) -> tuple[Filter, Seen]:
    """Readings that cannot be true are none."""
    state, _, why = believed(state, seen.temperature_c)
    return state, replace(seen, reading=None) if why else seen


@dataclass
class Base:
    """`base`: the base rule alone."""

    settings: Settings
    levers: Levers
    guarded: bool = True
    _state: base_rule.BaseState | None = None
    _filter: Filter = field(default_factory=Filter)

    def decide(self, seen: Seen) -> Decision:
        self._filter, seen = plausible(self._filter, seen)
        state = self._state or base_rule.start(self.levers, seen.now_s)
        self._state, decision = base_rule.step(self.settings, self.levers, state, seen)
        return decision


@dataclass
class Edged:
    """`edged`: the model-based policy."""

    settings: Settings
    levers: Levers
    guarded: bool = True
    state: policy_model.ModelState | None = None
    _filter: Filter = field(default_factory=Filter)

    def decide(self, seen: Seen) -> Decision:
        self._filter, seen = plausible(self._filter, seen)
        state = self.state or policy_model.start(self.settings, self.levers, seen.now_s)
        self.state, decision = policy_model.step(self.settings, self.levers, state, seen)
        return decision
