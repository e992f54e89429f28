"""The repetition detector: several streams that start to loop are noticed, one never is."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.engine.repetition import Repetition

Source = Iterator[int]


def prose(seed: int) -> Source:
    """Ids as a healthy model says them: some words far more often than others."""
    rng = random.Random(seed)
    while True:
        yield int(rng.paretovariate(0.7)) % 30_000


def loop(seed: int, period: int = 3) -> Source:
    return itertools.cycle([seed % 1000 * 50 + i for i in range(period)])


def table(seed: int) -> Source:
    """A list: every line begins with the same ten ids and goes on with six of its own."""
    own = prose(seed)
    while True:
        yield from range(100, 110)
        yield from itertools.islice(own, 6)


def play(
    found: Repetition, sources: dict[int, Source], tokens: int, step: int = 1
) -> tuple[int, str] | None:
    """All streams in turn, `step` ids at a time; the first jump, after how many ids of each."""
    for said in range(0, tokens, step):
        for stream, source in sources.items():
            found.feed(stream, list(itertools.islice(source, step)))
            words = found.jumped()
            if words:
                return said + step, words
    return None


def seasoned(make: Callable[[int], Source] = prose, streams: int = 12) -> Repetition:
    """An engine that has served a while, without a jump."""
    found = Repetition()
    for stream in range(10_000, 10_000 + streams):
        assert play(found, {stream: make(stream)}, 500) is None
        found.end(stream)
        assert found.jumped() is None
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_healthy_streams_are_never_a_jump(seed: int, streams: int, lists: bool) -> None:
    """Prose, and lists among it, however many streams run and however long."""
    sources = {i: (table if lists and i % 2 else prose)(seed + i) for i in range(streams)}
    assert play(seasoned(), sources, 600) is None


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(3, 8),
    st.integers(1, 20),
    st.sampled_from([1, 4]),
)
def test_streams_that_all_begin_to_loop_are_noticed(
    seed: int, streams: int, period: int, step: int
) -> None:
    """Within 200 tokens of each, a stuck token as well as a phrase; the words tell the shares."""
    found = seasoned()
    healthy = {i: prose(seed + i) for i in range(streams)}
    assert play(found, healthy, 150, step) is None
    broken = {i: loop(seed + i, period) for i in range(streams)}
    jump = play(found, broken, 200, step)
    assert jump is not None
    assert f"of the latest {max(streams, 5)} streams" in jump[1]
    assert "usually" in jump[1]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(2, 6), st.integers(1, 30))
def test_one_or_two_looping_streams_are_never_a_jump(
    seed: int, loops: int, others: int, period: int
) -> None:
    """A prompt that asks for repetition is its client's business, however long it goes on."""
    sources = {i: loop(seed + i, period) for i in range(loops)}
    sources |= {i: prose(seed + i) for i in range(loops, loops + others)}
    assert play(seasoned(), sources, 1500) is None


def test_a_looping_minority_is_never_a_jump() -> None:
    """Three of eight streams are one client's work; the other five speak for the engine."""
    sources = {i: loop(i) if i < 3 else prose(i) for i in range(8)}
    assert play(seasoned(), sources, 1500) is None


def test_an_engine_is_measured_against_its_own_past() -> None:
    """Where nearly everything is a form to be filled in, forms are no jump."""
    forms = seasoned(lambda seed: itertools.cycle(range(40)), streams=40)
    assert forms.usual > 0.65
    assert play(forms, {i: itertools.cycle(range(40)) for i in range(6)}, 600) is None
    lists = seasoned(table, streams=12)
    assert 0.2 < lists.usual < 0.5
    assert play(lists, {i: table(i) for i in range(6)}, 1000) is None
    for stream in range(6):
        lists.end(stream)
    assert play(lists, {i: loop(i) for i in range(10, 16)}, 300) is not None


def test_streams_one_after_the_other_count_too() -> None:
    """An engine with a single slot is judged by its latest five answers."""
    found = seasoned()
    jumps = []
    for stream in range(6):
        jumps.append(play(found, {stream: loop(stream)}, 60))
        found.end(stream)
        jumps.append(found.jumped())
    assert sum(jump is not None for jump in jumps) == 1


def test_nothing_is_called_a_jump_before_there_is_a_past() -> None:
    """Whoever has just started knows nothing unusual: the golden test covers the start."""
    assert play(Repetition(), {i: loop(i) for i in range(4)}, 400) is None


def test_a_jump_is_told_once_and_again_much_later() -> None:
    """Streams that go on looping ask for a test now and then, not with every token."""
    found = seasoned()
    sources = {i: loop(i) for i in range(4)}
    told = 0
    for _ in range(4000):
        told += play(found, sources, 1) is not None
    assert 2 <= told <= 4000 * 4 / 8192 + 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_how_ids_are_cut_does_not_matter(seed: int, cuts: list[int]) -> None:
    """One frame per token or many tokens in one: the same shares."""
    ids = list(itertools.islice(table(seed), sum(cuts)))
    pieces, whole = Repetition(), Repetition()
    rest = iter(ids)
    for cut in cuts:
        pieces.feed(1, list(itertools.islice(rest, cut)))
    whole.feed(1, ids)
    pieces.end(1)
    whole.end(1)
    assert pieces.usual == whole.usual


def test_memory_is_bounded_and_a_token_costs_little() -> None:
    """Endless streams, and streams whose end nobody told: no growth, and no slower with time."""
    found = Repetition()
    for stream in range(5000):
        found.feed(stream, list(range(40)))
    assert len(found._tails) <= 1024
    assert len(found._votes) <= 64
    found = Repetition()
    ids = list(itertools.islice(prose(1), 50_000))
    started_s = time.perf_counter()
    for token in ids:
        found.feed(1, (token,))
        found.jumped()
    per_token_s = (time.perf_counter() - started_s) / len(ids)
    print(f"{per_token_s * 1e6:.2f} us a token")
    assert per_token_s < 1e-4
    assert len(found._tails[1].grams) <= 256


@pytest.mark.parametrize("count", [0, 1, 5, 6, 23])
def test_an_answer_too_short_says_nothing(count: int) -> None:
    """Few tokens are no evidence, looping or not."""
    found = seasoned()
    for stream in range(20):
        found.feed(stream, [7] * count)
        found.end(stream)
        found.end(stream)
        assert found.jumped() is None
