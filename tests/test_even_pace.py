"""Promises of the even pace: the duty is held, and the gaps between tokens are even."""

from __future__ import annotations

import itertools
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from edged.worker.even_pace import EvenPace


def play(cycles: list[tuple[float, float]], duty: float) -> tuple[float, list[float]]:
    """Run (chunk, decode) seconds per cycle; returns the busy share and the ends of decodes."""
    pace, now_s, busy_s, ends = EvenPace(), 0.0, 0.0, []
    for chunk_s, decode_s in cycles:
        if chunk_s:
            now_s += max(0.0, pace.wait_s(now_s, duty, closes=False))
            pace.record(now_s, now_s + chunk_s, False, duty)
            now_s += chunk_s
        now_s += max(0.0, pace.wait_s(now_s, duty, closes=True))
        pace.record(now_s, now_s + decode_s, True, duty)
        now_s += decode_s
        busy_s += chunk_s + decode_s
        ends.append(now_s)
    return busy_s / now_s, ends


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3]), st.floats(0.2, 0.8)), min_size=200),
    st.floats(0.05, 1.0),
)
def test_the_duty_is_held_whatever_the_steps(
    cycles: list[tuple[float, float]], duty: float
) -> None:
    """Over many steps the busy share is the duty: pauses are moved, not lost or gained."""
    share, _ = play(cycles, duty)
    assert abs(share - duty) < 0.06 * duty + 0.01, (share, duty)


def test_chunks_do_not_show_in_the_gaps_while_there_is_pause_to_move() -> None:
    """Seven cycles of eight carry a chunk; at a duty of 0.9 the gaps are all but equal."""
    cycles = [(0.2 if n % 8 else 0.0, 0.64) for n in range(800)]
    _, ends = play(cycles, 0.9)
    gaps = [b - a for a, b in itertools.pairwise(ends[400:])]
    plain = [(chunk + decode) / 0.9 for chunk, decode in cycles[401:]]
    assert statistics.pstdev(gaps) < 0.2 * statistics.pstdev(plain)


def test_a_higher_duty_ends_a_long_pause_at_once() -> None:
    """New Limits act on the pause that runs, and an old debt is not collected for ever."""
    pace = EvenPace()
    pace.record(0.0, 0.6, True, 0.05)
    assert pace.wait_s(0.6, 0.05, closes=True) > 10.0
    assert pace.wait_s(0.7, 0.95, closes=True) < 0.1
    assert pace.wait_s(0.7, 1.0, closes=True) == 0.0


def test_waiting_for_work_buys_no_burst() -> None:
    """After an idle hour the next steps are paced as if there had been no hour."""
    pace, now_s = EvenPace(), 3600.0
    pace.record(0.0, 0.6, True, 0.5)
    pauses = []
    for _ in range(20):
        wait_s = max(0.0, pace.wait_s(now_s, 0.5, closes=True))
        pauses.append(wait_s)
        pace.record(now_s + wait_s, now_s + wait_s + 0.6, True, 0.5)
        now_s += wait_s + 0.6
    assert min(pauses[1:]) > 0.55
