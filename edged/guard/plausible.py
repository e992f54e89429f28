"""Plausibility: which temperature readings may be believed. Pure; what is refused counts as none.

Drivers answer -274, 0, 255, thousandths of a degree or wild jumps when they fail. Which of
several sensors speaks, and how old a reading may be, is decided elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOWEST_C, HIGHEST_C = -30.0, 125.0  # of a working board; it resets well below the highest
NOT_MEASURED_C = (0.0, 255.0, -274.0, -273.0)
JUMP_C = 40.0  # no chip does this between two readings
BELIEVE_AFTER = 10  # readings in a row around a new level: then the old one was wrong


@dataclass(frozen=True)
class Filter:
    """last_c: the last believed reading; strange: how many in a row jumped to about new_c."""

    last_c: float | None = None
    new_c: float = math.nan
    strange: int = 0


def believed(state: Filter, value_c: float | None) -> tuple[Filter, float | None, str]:
    """Returns the next state, the reading or None, and why not in words ("" = believed)."""
    if value_c is None:
        return state, None, "no reading"
    if not math.isfinite(value_c) or value_c in NOT_MEASURED_C:
        return state, None, f"{value_c:g} °C means not measured"
    if value_c >= 1000:
        return state, None, f"{value_c:g} °C looks like thousandths of a degree; check its unit"
    if not LOWEST_C <= value_c <= HIGHEST_C:
        return state, None, f"{value_c:g} °C is impossible on a working board"
    if state.last_c is not None and abs(value_c - state.last_c) >= JUMP_C:
        near = abs(value_c - state.new_c) < JUMP_C / 4
        strange = state.strange + 1 if near else 1
        if strange < BELIEVE_AFTER:
            why = f"jump from {state.last_c:g} to {value_c:g} °C"
            return Filter(state.last_c, value_c, strange), None, why
    return Filter(value_c), value_c, ""
