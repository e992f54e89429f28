"""Promises of the simulated board's physics and of its parameter files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.errors import ConfigError
from edged.twin import boards, physics
from edged.twin.physics import ThermalState, busy_power_w, step_time_s

FIELD = boards.load("field")
CARD = boards.load("310p3")
SLOW = boards.load("310b1")  # two thermal terms

powers = st.floats(0, 40)
spans = st.floats(0.001, 500)


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("mhz", [400, 600, 800])
def test_the_field_board_steps_and_draws_as_fitted(batch: int, mhz: float) -> None:
    """Step time and power follow the two formulas that reproduce the report's table."""
    x = 800 / mhz
    fitted_s = (0.2802 + 0.0167 * batch) * x
    share = 0.0167 * batch / (0.2802 + 0.0167 * batch)
    fitted_w = 6.0 + 1.25 / x + 13.26 / x**2 * share
    assert step_time_s(FIELD, batch, 1, 1536, mhz) == pytest.approx(fitted_s, rel=1e-3)
    assert busy_power_w(FIELD, batch, 1, 1536, mhz) == pytest.approx(fitted_w, rel=1e-3)
    assert step_time_s(FIELD, 1, 128, 1536, mhz) == pytest.approx(1.0 * x, rel=1e-3)


@pytest.mark.parametrize(
    ("board", "weights", "kv", "published_s", "tolerance"),
    [
        ("310b1", 3.09e9, 28_672, 0.142, 0.15),  # custom kernels, 1.5B BF16
        ("310b1", 6.17e9, 36_864, 0.284, 0.15),  # 3B
        ("310b1", 15.2e9, 57_344, 0.881, 0.25),  # 7B
        ("310b4", 1.78e9, 28_672, 1 / 5.40, 0.15),  # llama.cpp add-on, W8A8
        ("310p3", 8.19e9, 147_456, 1 / 18, 0.10),  # CI of vllm-ascend, 8-bit
        ("310p3", 14.8e9, 163_840, 1 / 10.7, 0.10),
    ],
)
def test_modelled_decode_speeds_meet_published_ones(
    board: str, weights: float, kv: int, published_s: float, tolerance: float
) -> None:
    """The general decode model gives the speeds people measured on these boards."""
    model = physics.Model("published", weights, kv, 2 * weights, 512)
    loaded = msgspec.structs.replace(boards.load(board), model=model)
    modelled_s = step_time_s(loaded, 1, 1, 512, loaded.max_mhz)
    assert modelled_s == pytest.approx(published_s, rel=tolerance)


def test_memory_bound_decode_ignores_the_core_clock() -> None:
    """Where decode waits for DDR and the exponent is 0, a lower clock costs only host time."""
    fast = step_time_s(CARD, 1, 1, 512, CARD.max_mhz)
    assert step_time_s(CARD, 1, 1, 512, CARD.max_mhz / 2) == pytest.approx(fast)


def test_a_busy_cpu_slows_the_npu() -> None:
    """The CPU shares the DDR: a busy CPU engine lengthens every step."""
    alone = step_time_s(FIELD, 4, 1, 1536, 800)
    assert step_time_s(FIELD, 4, 1, 1536, 800, cpu_busy_ratio=1.0) == pytest.approx(1.1 * alone)


@settings(deadline=None)
@given(st.sampled_from([FIELD, SLOW, CARD]), powers, powers, spans, spans)
def test_integration_is_exact_however_it_is_cut(
    board: physics.Board, before: float, power: float, first: float, second: float
) -> None:
    """One long advance equals two short ones, and its mean is their weighted mean."""
    start = ThermalState.at_rest(board).advance(7.0, before)
    whole = start.advance(first + second, power)
    parts = start.advance(first, power).advance(second, power)
    assert parts.temperature_c == pytest.approx(whole.temperature_c, abs=1e-6)
    halves = first * start.mean_c(first, power)
    halves += second * start.advance(first, power).mean_c(second, power)
    mean = start.mean_c(first + second, power)
    assert halves / (first + second) == pytest.approx(mean, abs=1e-6)


@settings(deadline=None)
@given(st.sampled_from([FIELD, SLOW]), powers, powers, spans)
def test_more_power_is_never_cooler(
    board: physics.Board, one: float, other: float, span: float
) -> None:
    """Temperature is monotone in power, and settles where the resistances say."""
    low, high = sorted((one, other))
    start = ThermalState.at_rest(board)
    cool, warm = start.advance(span, low), start.advance(span, high)
    assert warm.temperature_c >= cool.temperature_c - 1e-9
    total_r = sum(r for r, _ in board.thermal.terms)
    assert start.settled(high).temperature_c == pytest.approx(30.0 + total_r * high)


@settings(deadline=None)
@given(st.floats(6, 20), spans, st.floats(40, 120))
def test_a_crossing_is_found_where_the_temperature_is_the_target(
    power: float, span: float, target: float
) -> None:
    """reaches_s gives the moment of the crossing, or None when there is none."""
    start = ThermalState.at_rest(FIELD)
    at = start.reaches_s(span, power, target)
    end_c = start.advance(span, power).temperature_c
    if at is None:
        assert (start.temperature_c < target) == (end_c < target)
    else:
        assert start.advance(at, power).temperature_c == pytest.approx(target, abs=0.01)


def test_firmware_throttles_with_hysteresis() -> None:
    """86 °C halves the clock, which returns only at 76 °C."""
    assert physics.firmware_throttles(FIELD, False, 86.0)
    assert not physics.firmware_throttles(FIELD, False, 85.9)
    assert physics.firmware_throttles(FIELD, True, 80.0)
    assert not physics.firmware_throttles(FIELD, True, 76.0)
    assert physics.clock_mhz(FIELD, True, 800) == 400
    assert physics.clock_mhz(FIELD, False, 500) == 500


def test_the_fan_lowers_every_resistance() -> None:
    """6 °C/W at 40 % duty, 4.5 at 100 %, in between in between."""
    assert physics.fan_resistance(FIELD, 0.4) == 1.0
    assert physics.fan_resistance(FIELD, 0.0) == 1.0
    assert physics.fan_resistance(FIELD, 0.7) == pytest.approx(0.875)
    assert physics.fan_resistance(FIELD, 1.0) == 0.75


@pytest.mark.parametrize("name", boards.names())
def test_every_shipped_board_loads_and_can_idle(name: str) -> None:
    """Shipped boards are valid, and cool enough at rest to be useful."""
    board = boards.load(name)
    assert ThermalState.at_rest(board).temperature_c < board.firmware.release_c


def test_an_unknown_board_names_the_nearest() -> None:
    """A typo in a board's name is answered with what was meant."""
    with pytest.raises(ConfigError, match="'feild'; did you mean field"):
        boards.load("feild")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gears_mhz", "gear_mhz", "unknown key clock.gear_mhz; did you mean gears_mhz"),
        ("run_mode = 0", "run_mode = 2", "run_mode: invalid enum value 2"),
        ("idle_w = 6.0", 'idle_w = "6"', "power.idle_w: expected `float`"),
        ("heat_w = 2.5", "", "cpu: object missing required field `heat_w`"),
        ("[400, 500", "[500, 400", "clock.gears_mhz: ascending"),
        ("release_c = 76.0", "release_c = 90.0", "release_c < throttle_c < reset_c"),
        ("[[6.0, 4.0]]", "[]", "thermal.terms: at least one"),
    ],
)
def test_a_bad_board_file_names_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Typos, wrong types, missing and impossible values are each named with their key."""
    text = (boards.BOARDS_DIR / "field.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        boards.load(str(path))
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
