"""Promises of the thermal policies, for any state they can get into."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fakes_policy import FIELD, LEVERS, SETTINGS, Bench, order, predicted_w
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.guard import base_rule, choice, outlook, policy_model
from edged.guard.base_rule import BaseState
from edged.guard.choice import Budget
from edged.guard.estimator import HeatInput, HeatModel
from edged.guard.plausible import Filter, believed
from edged.guard.policy import CPU, DUTY_FLOOR, NPU, Levers, Seen
from edged.guard.policy_model import ModelState

NO_SETTER = replace(LEVERS, frequencies_mhz=())
seeds = st.integers(0, 10_000)
lengths = st.integers(1, 150)
temperatures = st.floats(30, 99)


def base_bench(levers: Levers = LEVERS) -> Bench[BaseState]:
    return Bench(base_rule.step, base_rule.start(levers, 0.0), levers)


def model_bench(levers: Levers = LEVERS) -> Bench[ModelState]:
    return Bench(policy_model.step, policy_model.start(SETTINGS, levers, 0.0), levers)


# --- the base rule -------------------------------------------------------------------------------


@settings(deadline=None)
@given(seeds, lengths, temperatures, temperatures, st.sampled_from([LEVERS, NO_SETTER]))
def test_the_base_rule_is_monotone_in_temperature(
    seed: int, length: int, one: float, other: float, levers: Levers
) -> None:
    """From any state a hotter reading gets no higher gear, no larger batch, no higher duty."""
    bench = base_bench(levers)
    bench.wander(seed, length)
    cool, hot = sorted((one, other))
    bench.now_s += 1.0
    _, at_cool = base_rule.step(SETTINGS, levers, bench.state, bench.seen(8, cool))
    _, at_hot = base_rule.step(SETTINGS, levers, bench.state, bench.seen(8, hot))
    assert all(h <= c for h, c in zip(order(at_hot), order(at_cool), strict=True))


def test_the_base_rule_lowers_frequency_and_batch_above_the_limit() -> None:
    """One reading above 80 °C costs one gear and half the batch, and no more within the dwell."""
    bench = base_bench()
    first = base_rule.step(SETTINGS, LEVERS, bench.state, bench.seen(8, 81.0))
    assert order(first[1]) == (700, 4, 1.0)
    assert first[1].mode == "throttled"
    bench.now_s = 5.0
    second = base_rule.step(SETTINGS, LEVERS, first[0], bench.seen(8, 81.0))
    assert order(second[1]) == (700, 4, 1.0)
    bench.now_s = 10.0
    third = base_rule.step(SETTINGS, LEVERS, second[0], bench.seen(8, 81.0))
    assert order(third[1]) == (600, 2, 1.0)


def test_the_base_rule_recovers_slowly_and_in_steps() -> None:
    """Between the hysteresis and the limit nothing moves; below it one step per recovery time."""
    state = BaseState(gear=1, batch=0, duty=0.5, good_s=0.0, changed_s=0.0)
    bench = base_bench()
    answers = {}
    for at_s in (29, 30, 31, 60, 90):
        bench.now_s = float(at_s)
        state, decision = base_rule.step(SETTINGS, LEVERS, state, bench.seen(8, 70.0))
        answers[at_s] = order(decision)
    assert answers == {
        29: (500, 1, 0.5),
        30: (500, 1, 1.0),
        31: (500, 1, 1.0),
        60: (600, 2, 1.0),
        90: (700, 4, 1.0),
    }
    bench.now_s = 300.0
    _, held = base_rule.step(SETTINGS, LEVERS, state, bench.seen(8, 78.0))
    assert order(held) == (700, 4, 1.0)


def test_critical_stops_everything() -> None:
    """At the critical temperature no stream runs, none is admitted, under either policy."""
    for bench in (base_bench(), model_bench()):
        bench.tick(8)
        bench.now_s += 1.0
        _, decision = bench.step(SETTINGS, LEVERS, bench.state, bench.seen(8, 88.0))
        for engine in (NPU, CPU):
            assert decision.limits[engine].max_batch == 0
            assert not decision.limits[engine].admit
        assert "critical" in decision.reason


# --- both ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(seeds, st.sampled_from(["base", "model"]))
def test_the_frequency_never_moves_faster_than_the_dwell(seed: int, name: str) -> None:
    """Whatever load, weather and sensor do, two frequency changes are a dwell apart."""
    bench = base_bench() if name == "base" else model_bench()
    bench.wander(seed, 400)
    gaps = [b - a for a, b in itertools.pairwise(bench.changes_s())]
    assert all(gap >= SETTINGS.dwell_s for gap in gaps)


@settings(deadline=None, max_examples=60)
@given(seeds, lengths, st.integers(1, 20), st.sampled_from(["base", "model"]))
def test_a_lost_sensor_never_raises_a_limit(seed: int, length: int, blind: int, name: str) -> None:
    """While no reading comes every limit stays or falls, and after the grace all are lowest."""
    bench = base_bench() if name == "base" else model_bench()
    bench.wander(seed, length)
    decisions = [bench.tick(8)]
    decisions += [bench.tick(8, blind=True) for _ in range(blind)]
    for before, after in itertools.pairwise(order(d) for d in decisions):
        assert all(a <= b for a, b in zip(after, before, strict=True))
    if blind > SETTINGS.grace_s + SETTINGS.dwell_s + 2:
        assert order(decisions[-1])[1:] in {(1, DUTY_FLOOR), (0, DUTY_FLOOR)}


# --- the model-based policy ----------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(seeds, lengths, temperatures, temperatures, st.sampled_from([LEVERS, NO_SETTER]))
def test_a_hotter_reading_never_raises_the_predicted_power(
    seed: int, length: int, one: float, other: float, levers: Levers
) -> None:
    """From any state the power a decision asks for does not grow with the temperature."""
    bench = model_bench(levers)
    bench.wander(seed, length)
    cool, hot = sorted((one, other))
    bench.now_s += 1.0
    _, at_cool = policy_model.step(SETTINGS, levers, bench.state, bench.seen(8, cool))
    _, at_hot = policy_model.step(SETTINGS, levers, bench.state, bench.seen(8, hot))
    assert predicted_w(at_hot) <= predicted_w(at_cool) + 1e-9


@pytest.mark.parametrize("levers", [LEVERS, NO_SETTER], ids=["setter", "no-setter"])
def test_the_model_policy_settles_just_under_the_limit(levers: Levers) -> None:
    """Ten minutes of full load: the chip stays within 1 °C below the limit, at most of the
    batch."""
    bench = model_bench(levers)
    readings = []
    for _ in range(900):
        bench.tick(8)
        readings.append(bench.heat.temperature_c)
    assert 79.0 < sum(readings[300:]) / len(readings[300:]) <= 80.0
    assert max(readings[60:]) < 82.0
    assert bench.limits.max_batch >= 7


@pytest.mark.parametrize("warm_c", [66.0, 72.0, 79.0, 86.0])
def test_a_wrong_first_guess_of_the_clock_does_not_last(warm_c: float) -> None:
    """However warm the chip is when the guard starts, after ten minutes it runs at the clock and
    batch that are the best under the limit, and a chip that is only warm is not called hopeless."""
    bench = model_bench()
    bench.heat = bench.heat.settled((warm_c - bench.heat.ambient_c) / 6.0)
    for _ in range(600):
        decision = bench.tick(8)
    assert order(decision)[:2] == (500, 8)
    assert order(decision)[2] > 0.85
    assert "idles" not in decision.reason


def test_a_rounding_sensor_does_not_show_between_tokens() -> None:
    """Once settled, whole-degree readings move the duty by less than 3 % from one to the next,
    so the time between tokens stays even."""
    bench = model_bench()
    duties = []
    for _ in range(900):
        bench.tick(8, quantum_c=1.0)
        duties.append(bench.limits.duty)
    late = duties[600:]
    assert max(abs(b - a) / a for a, b in itertools.pairwise(late)) < 0.03


def test_full_duty_is_reached_again() -> None:
    """After a hot hour in a cool room nothing is held back any more and the mode says normal."""
    bench = model_bench()
    for _ in range(300):
        bench.tick(8)
    for _ in range(300):
        decision = bench.tick(1, ambient_c=15.0)
    assert order(decision)[2] == 1.0
    assert decision.mode == "normal"


def test_an_urgent_reading_still_lowers_the_duty_at_once() -> None:
    """Smoothing delays nothing that matters: above limit + urgent the floor follows at once."""
    bench = model_bench()
    for _ in range(600):
        bench.tick(8)
    before = bench.limits.duty
    bench.now_s += 1.0
    _, decision = policy_model.step(SETTINGS, LEVERS, bench.state, bench.seen(8, 83.5))
    assert before > 0.5
    assert order(decision)[2] == DUTY_FLOOR


def test_a_stuck_sensor_is_noticed() -> None:
    """A value that does not follow the load counts as no reading; a moving one is believed."""
    bench = model_bench()
    for _ in range(120):
        bench.tick(0)
    for _ in range(120):
        bench.tick(8)
    last = None
    for _ in range(60):  # the load stops, the reading does not move
        bench.now_s += 1.0
        seen = bench.seen(0, 79.5)
        bench.state, last = policy_model.step(SETTINGS, LEVERS, bench.state, seen)
    assert last is not None
    assert "no plausible temperature" in last.reason
    for temperature_c in (78.0, 77.0, 76.0):
        bench.now_s += 1.0
        seen = bench.seen(0, temperature_c)
        bench.state, last = policy_model.step(SETTINGS, LEVERS, bench.state, seen)
    assert "no plausible" not in last.reason


def test_a_board_that_idles_above_the_limit_is_told_apart() -> None:
    """43 °C around the board: lowest point within 10 s, the reason names the idle temperature
    and what to do, and admission stays open."""
    bench = model_bench()
    for _ in range(60):
        bench.tick(0, ambient_c=46.0)
    decision = bench.tick(8, ambient_c=46.0)
    for _ in range(10):
        decision = bench.tick(8, ambient_c=46.0)
    assert order(decision) == (400, 1, DUTY_FLOOR)
    assert decision.mode == "throttled"
    assert "idles at 8" in decision.reason
    assert "raise the fan" in decision.reason
    assert decision.limits[NPU].admit


def test_a_board_that_idles_just_below_the_limit_has_nothing_to_give() -> None:
    """43 °C around it, idle at 79: lowest clock, batch 1, floor duty and the reason, and no
    higher clock in between."""
    bench = model_bench()
    bench.heat = replace(bench.heat, ambient_c=43.0).settled(FIELD.power.idle_w)
    for _ in range(30):
        bench.tick(0, ambient_c=43.0)
    for _ in range(60):
        decision = bench.tick(8, ambient_c=43.0)
        assert order(decision) == (400, 1, DUTY_FLOOR)
    assert decision.mode == "throttled"
    assert "idles at 79 °C" in decision.reason


def test_a_model_that_explains_nothing_gives_way_to_the_base_rule() -> None:
    """Readings that no first-order chip could give: the base rule decides for a while."""
    bench = model_bench()
    for _ in range(60):
        bench.tick(8)
    for n in range(200):
        bench.now_s += 1.0
        seen = bench.seen(8, 50.0 if n % 2 else 75.0)
        bench.state, _ = policy_model.step(SETTINGS, LEVERS, bench.state, seen)
        if bench.now_s < bench.state.fallback_s:
            break
    assert bench.now_s < bench.state.fallback_s


def test_the_fan_goes_first_and_is_quiet_at_night() -> None:
    """With a fan lever, heat that costs speed raises the fan to full, in quiet hours to half."""
    levers = replace(LEVERS, fan=True)
    bench = model_bench(levers)
    for _ in range(60):
        decision = bench.tick(8)
    assert decision.fan_ratio == 1.0
    quiet = replace(bench.seen(8, 79.0), quiet=True)
    _, decision = policy_model.step(SETTINGS, levers, bench.state, quiet)
    assert decision.fan_ratio == SETTINGS.quiet_fan_ratio


def test_a_cpu_engine_gives_way_to_a_working_npu() -> None:
    """Heat that costs speed takes the CPU engine to its floor before the NPU pays for it."""
    bench = model_bench()
    for _ in range(60):
        decision = bench.tick(8)
    assert decision.limits[CPU].duty == DUTY_FLOOR


# --- the parts -----------------------------------------------------------------------------------


def test_the_estimator_learns_the_true_board() -> None:
    """After some load the step model is within 3 % and the idle temperature within 5 °C."""
    bench = model_bench()
    for second in range(900):
        bench.tick((8, 2, 5, 8)[second // 60 % 4])
    steps, heat = bench.state.steps, bench.state.heat
    assert heat is not None
    x = 800.0 / bench.mhz
    assert steps.step_s(8, x) == pytest.approx((0.2802 + 0.0167 * 8) * x, rel=0.03)
    assert heat.now.offset_c == pytest.approx(66.0, abs=5.0)


def test_changes_of_the_clock_are_at_most_twenty_an_hour() -> None:
    """A budget that is spent whenever it may be gives no more than 20 in any hour."""
    budget, spent = Budget(), []
    for now_s in range(0, 4 * 3600, 5):
        if budget.worth(9.9, float(now_s)):
            budget = budget.spent(float(now_s))
            spent.append(now_s)
    assert max(sum(t <= s < t + 3600 for s in spent) for t in spent) <= 20


def test_small_chunks_only_where_they_are_cheap() -> None:
    """Chunks that cost by the token come out small, chunks that cost a pass over the weights
    come out about as large as they may be."""
    by_token = choice.chunk_tokens(lambda size: size / 128, 0.4138, 14, 64)
    by_pass = choice.chunk_tokens(lambda size: 0.2 + size / 6400, 0.2, 14, 64)
    assert by_token == 16
    assert by_pass >= 52


def test_time_to_the_limit() -> None:
    """The forecast is the first-order answer: now, never, or the logarithm."""
    heat = HeatModel.at(70.0)
    warm = HeatInput(1.0, 0.1)  # 19 °C by the first guess
    assert outlook.time_to_s(heat, HeatInput(0.0, 0.0), 80.0) is None
    assert outlook.time_to_s(HeatModel.at(81.0), warm, 80.0) == 0.0
    seconds = outlook.time_to_s(heat, warm, 80.0)
    assert seconds is not None
    assert heat.now.drifted_c(70.0, seconds, warm) == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-274.0, "not measured"),
        (0.0, "not measured"),
        (255.0, "not measured"),
        (float("nan"), "not measured"),
        (66_000.0, "thousandths"),
        (140.0, "impossible"),
        (25.0, "jump"),
        (None, "no reading"),
    ],
)
def test_readings_that_cannot_be_true_are_none(value: float | None, why: str) -> None:
    """Each known way of a driver to fail is refused and named; the next good reading counts."""
    state, _, _ = believed(Filter(), 66.0)
    state, reading, reason = believed(state, value)
    assert reading is None
    assert why in reason
    assert believed(state, 67.0)[1] == 67.0


def test_a_lasting_new_level_is_believed() -> None:
    """After ten readings around it a jump was real, or the reading before it was wrong."""
    state, _, _ = believed(Filter(), 20.0)
    for _ in range(9):
        state, reading, _ = believed(state, 66.0)
        assert reading is None
    assert believed(state, 66.0)[1] == 66.0


def test_decisions_do_not_change_what_they_are_given() -> None:
    """A step is pure: the same state and sight give the same answer twice."""
    bench = model_bench()
    bench.wander(3, 90)
    seen: Seen = bench.seen(8, 77.0)
    first = policy_model.step(SETTINGS, LEVERS, bench.state, seen)
    assert policy_model.step(SETTINGS, LEVERS, bench.state, seen) == first
