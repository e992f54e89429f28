"""The soak's judgement: leaks are found, noise and warm-up are not called one."""

from __future__ import annotations

import random

import pytest

from chaos.trend import trend


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_leak_is_found_in_noise(seed: int) -> None:
    """Half a unit a round, in noise of two units, over forty rounds."""
    rng = random.Random(seed)
    found = trend([100 + 0.5 * i + rng.gauss(0, 2) for i in range(40)], 0.2)
    assert found is not None
    assert 0.3 < found < 0.7


def test_one_file_in_five_rounds_is_a_leak() -> None:
    """A descriptor that is forgotten now and then."""
    assert trend([20 + i // 5 for i in range(20)], 0.05) is not None


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_trend(seed: int) -> None:
    """Values without order are not called a leak, nor is a single jump of one."""
    rng = random.Random(seed)
    assert trend([100 + rng.gauss(0, 2) for _ in range(40)], 0.25) is None
    assert trend([20.0] * 10 + [25.0] + [20.0] * 9, 0.05) is None


def test_warm_up_is_no_trend() -> None:
    """Caches that fill in the first rounds and stay as they are."""
    assert trend([80, 85, 88, 90, 90] + [90] * 15, 0.25) is None


def test_few_rounds_say_nothing() -> None:
    """Three rounds cannot show a trend."""
    assert trend([1, 2, 3], 0.1) is None
