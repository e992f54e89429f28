"""The sampler: the same numbers for the same (seed, index), the right distribution, no NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes_worker import ask
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.worker.sampler import FAULT, Draw, Sampler

VOCAB = 500


def logits(rows: int = 1, seed: int = 0, width: int = VOCAB) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, width)) * 3).astype(np.float32)


def draw(index: int = 0, **more: object) -> Draw:
    made = Draw(ask(1, [1, 2, 3], 100, **({"temperature": 1.0} | more)))
    made.index = index
    return made


def tokens(row: np.ndarray, count: int, **more: object) -> np.ndarray:
    """`count` draws from one row, at the indices 0, 1, 2, ..."""
    sampler = Sampler(VOCAB)
    made = draw(**more)
    found = []
    for index in range(count):
        made.index = index
        found.append(sampler.draw(row, [(0, made)])[0].token)
    return np.asarray(found)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def test_greedy_is_the_likeliest() -> None:
    """Temperature 0, with or without logprobs, is the argmax of each row."""
    rows = logits(8)
    plain = [(i, draw(temperature=0.0)) for i in range(8)]
    detailed = [(i, draw(temperature=0.0, logprobs=2)) for i in range(8)]
    sampler = Sampler(VOCAB)
    best = rows.argmax(axis=1).tolist()
    assert [d.token for d in sampler.draw(rows, plain)] == best
    assert [d.token for d in sampler.draw(rows, detailed)] == best


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 10**6), place=st.integers(0, 7))
def test_a_draw_depends_on_seed_and_index_alone(seed: int, index: int, place: int) -> None:
    """Neither the neighbours in the batch nor what was drawn before changes a token."""
    rows = logits(8)
    rows[place] = logits(1, seed=5)[0]
    alone = Sampler(VOCAB).draw(rows[place : place + 1], [(0, draw(index, seed=seed))])
    others = [(i, draw(index + i, seed=i)) for i in range(8) if i != place]
    busy = Sampler(VOCAB)
    busy.draw(rows, others)
    mixed = busy.draw(rows, [*others, (place, draw(index, seed=seed))])
    assert mixed[-1] == alone[0]


def test_the_numbers_are_uniform_and_known() -> None:
    """In [0, 1), spread evenly over indices and seeds; pinned, for other versions must agree."""
    sampler = Sampler(VOCAB)
    for numbers in (
        np.array([sampler.uniform(42, i) for i in range(4000)]),
        np.array([sampler.uniform(i, 0) for i in range(4000)]),
    ):
        assert ((numbers >= 0) & (numbers < 1)).all()
        assert len(np.unique(numbers)) == 4000
        counts, _ = np.histogram(numbers, 10, (0, 1))
        assert abs(counts - 400).max() < 90
    fresh = np.random.Philox(key=7, counter=3).random_raw()
    assert sampler.uniform(7, 3) == (int(fresh) >> 11) * 2.0**-53
    assert sampler.uniform(7, 3) == pytest.approx(PINNED_7_3, abs=1e-15)


PINNED_7_3 = 0.44205212947108785


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("scale", [1, 8])
def test_draws_follow_the_distribution(temperature: float, scale: float) -> None:
    """Frequencies match the softmax at the given temperature, be it flat or peaked."""
    row = logits() * np.float32(scale)
    found = np.bincount(tokens(row, 6000, temperature=temperature), minlength=VOCAB) / 6000
    wanted = softmax(row[0] / temperature)
    assert np.abs(found - wanted).max() < 5 * math.sqrt(0.25 / 6000)
    assert np.abs(found - wanted).sum() < 0.3


def test_top_k_leaves_exactly_k() -> None:
    """Only the k likeliest are drawn, in their own proportions; equals do not add a place."""
    row = logits()
    best = np.argsort(-row[0])[:5]
    found = tokens(row, 3000, top_k=5)
    assert set(found) == set(best)
    wanted = softmax(row[0][best])
    counts = np.array([(found == t).mean() for t in best])
    assert np.abs(counts - wanted).max() < 0.05
    assert len(set(tokens(np.zeros((1, VOCAB), np.float32), 200, top_k=3))) == 3


@settings(deadline=None, max_examples=40)
@given(top_p=st.floats(0.01, 0.999), seed=st.integers(0, 1000), scale=st.floats(0.1, 4))
def test_top_p_keeps_the_smallest_set_that_holds_p(top_p: float, seed: int, scale: float) -> None:
    """No token outside the nucleus is ever drawn."""
    row = logits(seed=seed) * np.float32(scale)
    chances = softmax(row[0])
    order = np.argsort(-chances, kind="stable")
    size = int(np.searchsorted(np.cumsum(chances[order]), top_p - 1e-6)) + 1
    nucleus = set(order[: size + 1].tolist())  # one more: float32 may round the border
    assert set(tokens(row, 60, top_p=top_p).tolist()) <= nucleus


def test_top_p_of_the_whole_nucleus_is_reached() -> None:
    """Every member of a small nucleus is drawn sooner or later."""
    row = np.full((1, VOCAB), -20, np.float32)
    row[0, [3, 70, 400]] = (2.0, 1.5, 1.0)
    assert set(tokens(row, 300, top_p=0.99)) == {3, 70, 400}
    assert set(tokens(row, 300, top_p=0.6)) == {3, 70}
    assert set(tokens(row, 50, top_p=0.01)) == {3}


def test_min_p_is_relative_to_the_likeliest() -> None:
    """Tokens below min_p times the best chance are never drawn."""
    row = np.full((1, VOCAB), -9, np.float32)
    row[0, [1, 2, 3]] = np.log([1.0, 0.5, 0.05])
    assert set(tokens(row, 300, min_p=0.3)) == {1, 2}
    assert set(tokens(row, 300, min_p=0.01)) == {1, 2, 3}


def test_rules_combine() -> None:
    """top_k, min_p and top_p apply one after the other, each over what is left."""
    row = np.full((1, VOCAB), -30, np.float32)
    row[0, :6] = np.log([0.4, 0.3, 0.1, 0.1, 0.06, 0.04])
    assert set(tokens(row, 300, top_k=2, top_p=0.99)) == {0, 1}
    assert set(tokens(row, 300, top_k=5, min_p=0.2, top_p=0.75)) == {0, 1}


def test_padded_ids_are_never_drawn() -> None:
    """Ids at or above the tokenizer's size do not exist, however likely the head finds them."""
    row = logits(width=VOCAB + 12)
    row[:, VOCAB:] = 50
    for more in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}):
        assert tokens(row, 50, **more).max() < VOCAB


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_a_fault(bad: float, temperature: float) -> None:
    """One bad value spoils its row, never a token and never a neighbour."""
    rows = logits(3)
    rows[1, 123] = bad
    draws = [(i, draw(temperature=temperature)) for i in range(3)]
    found = [d.token for d in Sampler(VOCAB).draw(rows, draws)]
    assert found[1] == FAULT
    assert min(found[0], found[2]) >= 0


def test_repetition_penalty_covers_prompt_and_answer() -> None:
    """Positive logits are divided, negative ones multiplied, once for each id seen."""
    row = np.zeros((1, VOCAB), np.float32)
    row[0, [1, 4, 9]] = (4.0, 3.0, 2.5)
    made = Draw(ask(1, [1, 1], 9, repetition_penalty=2.0))
    sampler = Sampler(VOCAB)
    assert sampler.draw(row, [(0, made)])[0].token == 4
    made.advance(4)
    assert sampler.draw(row, [(0, made)])[0].token == 9
    assert row[0, 1] == 4.0  # the logits themselves are left alone


def test_presence_and_frequency_penalties_cover_the_answer_only() -> None:
    """The prompt is not punished; frequency counts, presence does not."""
    row = np.full((1, VOCAB), -9, np.float32)
    row[0, [1, 2]] = (3.0, 2.0)
    sampler = Sampler(VOCAB)
    flat = Draw(ask(1, [1, 1], 9, presence_penalty=0.9))
    steep = Draw(ask(1, [1, 1], 9, frequency_penalty=0.6))
    carried = Draw(ask(1, [1, 1, 1], 9, prompt_tokens=1, frequency_penalty=0.6))
    assert sampler.draw(row, [(0, flat)])[0].token == 1
    assert sampler.draw(row, [(0, carried)])[0].token == 2
    for _ in range(2):
        flat.advance(1)
        steep.advance(1)
    assert sampler.draw(row, [(0, flat)])[0].token == 1
    assert sampler.draw(row, [(0, steep)])[0].token == 2


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Before temperature and penalties; the chosen token and the n likeliest, best first."""
    row = logits()
    wanted = np.log(softmax(row[0]))
    made = draw(temperature=0.3, repetition_penalty=1.5, logprobs=4)
    drawn = Sampler(VOCAB).draw(row, [(0, made)])[0]
    assert drawn.logprobs is not None
    chosen, rivals = drawn.logprobs
    assert chosen == pytest.approx(wanted[drawn.token], abs=1e-4)
    assert [i for i, _ in rivals] == np.argsort(-row[0])[:4].tolist()
    assert [lp for _, lp in rivals] == pytest.approx(wanted[np.argsort(-row[0])[:4]], abs=1e-4)
    none = Sampler(VOCAB).draw(row, [(0, draw(logprobs=0))])[0].logprobs
    assert none is not None and none[1] == []


@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 1e3])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """Nothing overflows: near 0 is greedy, very high is any token."""
    found = tokens(logits() * 30, 40, temperature=temperature)
    assert found.min() >= 0
    assert (len(set(found)) == 1) == (temperature < 1)
