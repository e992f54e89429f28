"""Stuck: whether a temperature that never changes is a dead sensor. Pure.

Held steady, a chip shows the same whole degree for hours, and the guard itself trades batch for
duty at a constant temperature. So only this counts: not the smallest change over a long idle
stretch and a long busy one. It takes minutes, and a board that is always busy never shows it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

STRETCH_S = 60.0  # of each kind, without a pause: the fast terms of a chip's heat have settled
IDLE_RATIO, BUSY_RATIO = 0.02, 0.5  # what lies between them counts as neither
_STEP_C = 0.05  # half the smallest step of a sensor with tenths
_GAP_S = 60.0  # a longer pause between readings says nothing about what went on


@dataclass(frozen=True)
class Still:
    """A run of equal readings. idle_s, busy_s: the stretch under way; the longest: so far."""

    value_c: float | None = None
    at_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0
    longest_idle_s: float = 0.0
    longest_busy_s: float = 0.0

    @property
    def stuck(self) -> bool:
        return min(self.longest_idle_s, self.longest_busy_s) >= STRETCH_S


def over(ratios: Collection[float | None]) -> float | None:
    """One busy ratio for a stretch of several: idle or busy only if all of it was."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return None
    if max(known) <= IDLE_RATIO:
        return max(known)
    return min(known) if min(known) >= BUSY_RATIO else (IDLE_RATIO + BUSY_RATIO) / 2


def watched(state: Still, value_c: float, busy_ratio: float | None, at_s: float) -> Still:
    """The state after one more reading. busy_ratio: share of the time since the last one that
    the NPU executed; None = not known."""
    if state.value_c is None or abs(value_c - state.value_c) >= _STEP_C:
        return Still(value_c, at_s)
    passed_s = at_s - state.at_s
    known = busy_ratio is not None and 0 <= passed_s <= _GAP_S
    idle_s = state.idle_s + passed_s if known and (busy_ratio or 0.0) <= IDLE_RATIO else 0.0
    busy_s = state.busy_s + passed_s if known and (busy_ratio or 0.0) >= BUSY_RATIO else 0.0
    return Still(
        state.value_c,
        at_s,
        idle_s,
        busy_s,
        max(state.longest_idle_s, idle_s),
        max(state.longest_busy_s, busy_s),
    )
