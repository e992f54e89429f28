"""Does a figure grow from round to round? Pure: values in, a verdict in words out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

LEAST = 8  # rounds; fewer say nothing
SURE_Z = 2.58  # of Mann and Kendall: 1 in 200 by chance
WARM_UP = 0.25  # share of the rounds in which caches fill


def trend(values: Sequence[float], least_per_round: float) -> float | None:
    """Growth per round (Theil and Sen's median slope, which outliers do not move) where it is at
    least `least_per_round` and, by Mann and Kendall's test, not chance; else None."""
    values = values[int(len(values) * WARM_UP) :]
    if len(values) < LEAST:
        return None
    pairs = list(itertools.combinations(enumerate(values), 2))
    slope = statistics.median((later - sooner) / (j - i) for (i, sooner), (j, later) in pairs)
    return slope if slope >= least_per_round and _score(values) > SURE_Z else None


def _score(values: Sequence[float]) -> float:
    """Standard normal if the values are in no order; ties are allowed for."""
    n = len(values)
    pairs = itertools.combinations(values, 2)
    rises = sum((later > sooner) - (later < sooner) for sooner, later in pairs)
    ties = [values.count(value) for value in set(values)]
    variance = n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)
    return 0.0 if variance <= 0 else (rises - 1) / math.sqrt(variance / 18) if rises > 0 else 0.0
