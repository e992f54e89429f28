"""Choice: the operating point with the most tokens per second under limit and pace. Pure.

The model-based policy asks with what it has learned, the lab's oracle with the true numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edged.guard.policy import DUTY_FLOOR, Levers, Point

Gear = float | None
_CHUNK_SHARE = 1 / 3  # of a decode step a prefill chunk may take
_MOST, _EVERY_S = 4.0, 225.0  # 4 + 16 in an hour
_GAIN = 1.03  # the least a change of the clock must bring
_THRIFT = 0.12  # more when few changes are left
_DEAR = 1.2  # times the cheapest cost per token


@dataclass(frozen=True)
class Plant:
    """A board in three functions of (frequency or None, batch): seconds of a decode step, steady
    °C of rise at duty 1, and (frequency) seconds of prefill per generated token."""

    step_s: Callable[[Gear, int], float]
    rise_c: Callable[[Gear, int], float]
    prefill_s: Callable[[Gear], float]


@dataclass(frozen=True)
class Budget:
    """How often the clock may change: `left` now, one more each _EVERY_S, at most _MOST at once;
    so at most 20 in any hour."""

    left: float = _MOST
    at_s: float = 0.0

    def worth(self, gain: float, now_s: float) -> bool:
        """Whether a change that multiplies the speed by `gain` is worth one of those left; the
        fewer, the more it must bring."""
        left = self._now(now_s)
        return left >= 1.0 and gain > _GAIN + _THRIFT * (1.0 - left / _MOST)

    def ample(self, now_s: float) -> bool:
        """Enough are left that one may be spent on learning."""
        return self._now(now_s) >= _MOST / 2

    def spent(self, now_s: float) -> Budget:
        return Budget(max(0.0, self._now(now_s) - 1.0), now_s)

    def _now(self, now_s: float) -> float:
        return min(_MOST, self.left + max(0.0, now_s - self.at_s) / _EVERY_S)


@dataclass(frozen=True)
class Option:
    """A point with what is expected of it. pace_s: between two tokens of one stream, prefill
    chunks of others left out."""

    point: Point
    tokens_per_s: float
    pace_s: float
    rise_c: float


def options(
    plant: Plant, gears: Sequence[Gear], batches: Sequence[int], demand: int, headroom_c: float
) -> list[Option]:
    """Every (frequency, batch) with the highest duty whose rise fits into the headroom."""
    found = []
    for gear in gears:
        prefill_s = plant.prefill_s(gear)
        for batch in batches:
            if batch > demand and batch != batches[0]:
                break
            step_s, full_c = plant.step_s(gear, batch), plant.rise_c(gear, batch)
            duty = min(1.0, max(DUTY_FLOOR, headroom_c / full_c if full_c > 0 else 1.0))
            speed = duty * batch / (step_s + batch * prefill_s)
            found.append(Option(Point(gear, batch, duty), speed, step_s / duty, full_c * duty))
    return found


def best(found: Sequence[Option], itl_slo_s: float) -> Option:
    """The fastest within the pace; if none is, the one with the shortest time between tokens.
    Equal ones: the lower clock and smaller batch."""

    def rank(option: Option) -> tuple[bool, float, float, float]:
        within = option.pace_s <= itl_slo_s
        value = option.tokens_per_s if within else -option.pace_s
        return within, value, -(option.point.frequency_mhz or 0.0), -option.point.batch

    return max(found, key=rank)


def chunk_tokens(
    chunk_s: Callable[[int], float], step_s: float, arriving_tokens: float, largest: int
) -> int:
    """Prompt tokens per prefill chunk: the fewest that cost hardly more per token than the
    largest chunk, keep up with the prompts and take no more than a third of a decode step.

    Small chunks keep the time between tokens even; where a chunk costs a pass over the weights
    whatever its size, small ones waste it and the largest comes out.
    """
    sizes = [size for size in range(4, largest, 4) if size >= 8] + [largest]
    cheap = _DEAR * chunk_s(largest) / largest
    for size in sizes:
        cost_s = chunk_s(size)
        next_s = chunk_s(min(size + 4, largest))
        enough = size >= arriving_tokens and next_s > _CHUNK_SHARE * step_s
        if enough and cost_s / size <= cheap:
            return size
    return largest


def gears_of(levers: Levers) -> tuple[Gear, ...]:
    return levers.frequencies_mhz or (None,)
