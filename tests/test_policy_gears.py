"""Policies on boards whose graphs know only some batch sizes, and on machines with hiccups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes_policy import LEVERS, SETTINGS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.core import Limits
from edged.guard import base_rule, policy_model
from edged.guard.base_rule import BaseState
from edged.guard.policy import NPU, Levers, Load, Seen

GEARS = [(1, 4, 8), (1, 8), (1, 2, 8), (1, 3, 7, 8)]


@settings(deadline=None, max_examples=60)
@given(
    batches=st.sets(st.integers(1, 64), max_size=6).map(lambda s: tuple(sorted({1, *s}))),
    gears=st.integers(0, 5),
)
def test_the_base_rule_comes_all_the_way_back(batches: tuple[int, ...], gears: int) -> None:
    """From its lowest point a cool chip returns to the top gear and the widest batch, whatever
    sizes there are."""
    levers = Levers(tuple(400.0 + 100 * i for i in range(gears)), batches)
    bench = Bench(base_rule.step, base_rule.start(levers, 0.0), levers)
    state = BaseState(gear=0, batch=0, duty=0.05, good_s=0.0, changed_s=0.0)
    for second in range(0, 1200, 10):
        bench.now_s = float(second)
        state, decision = base_rule.step(SETTINGS, levers, state, bench.seen(8, 60.0))
    assert decision.limits[NPU] == Limits(batches[-1], 1.0, 64)
    assert decision.frequency_mhz == (levers.frequencies_mhz[-1] if gears else None)


@pytest.mark.parametrize("batches", GEARS, ids=str)
def test_the_model_policy_uses_wide_batches_whatever_sizes_there_are(
    batches: tuple[int, ...],
) -> None:
    """Eight clients on a board compiled for a few batch sizes get the widest one."""
    levers = replace(LEVERS, batches=batches)
    bench = Bench(policy_model.step, policy_model.start(SETTINGS, levers, 0.0), levers)
    for _ in range(900):
        bench.tick(8)
    assert bench.limits.max_batch >= 7
    assert bench.heat.temperature_c <= 80.5


class Hiccups(Bench[policy_model.ModelState]):
    """A host that is busy elsewhere between `start_s` and `end_s`: wide steps take `slow` times
    longer, narrow ones do not."""

    start_s, end_s, slow = 0.0, 0.0, 8.0

    def seen(self, demand: int, temperature_c: float | None) -> Seen:
        seen = super().seen(demand, temperature_c)
        wide = self.limits.max_batch > 2 and self.start_s <= self.now_s < self.end_s
        return replace(seen, npu=_slower(seen.npu, self.slow)) if wide else seen


def _slower(load: Load, factor: float) -> Load:
    return replace(load, decode_busy_s=load.decode_busy_s * factor)


@pytest.mark.parametrize("batches", [tuple(range(1, 9)), (1, 4, 8)], ids=str)
@pytest.mark.parametrize("seconds", [3, 20, 60])
def test_a_hiccup_of_the_host_is_not_remembered_for_ever(
    batches: tuple[int, ...], seconds: int
) -> None:
    """Wide steps that were slow for a while make the batch small for a while, not for good."""
    levers = replace(LEVERS, batches=batches)
    bench = Hiccups(policy_model.step, policy_model.start(SETTINGS, levers, 0.0), levers)
    bench.start_s, bench.end_s = 400.0, 400.0 + seconds
    for _ in range(1900):
        bench.tick(8)
    assert bench.limits.max_batch >= 7
