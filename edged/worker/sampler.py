"""Draws token ids from full logits, in NumPy; knows no slots, no cache and no clock.

The random number of a token depends on (seed, token index) alone, so a stream continued
elsewhere draws the same numbers. A row that is not finite is a fault, never a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edged.wire import Submit

FAULT = -1
_GROUP = 64
_MANY = 0.25  # share of the vocabulary above which picking ids out costs more than taking all
_COLDEST = 1e-6  # below it temperature is greedy anyway, and 1 / it overflows
_UINT64 = (1 << 64) - 1
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Logprobs = tuple[float, list[tuple[int, float]]]


class Drawn(NamedTuple):
    """token is FAULT for a row that is not finite."""

    token: int
    logprobs: Logprobs | None = None


class Draw:
    """How one stream's tokens are drawn, and what its penalties must remember."""

    def __init__(self, ask: Submit) -> None:
        self.ask = ask
        self.index = len(ask.tokens) - ask.prompt_tokens
        self.greedy = ask.temperature <= 0
        self.penalises = (
            ask.repetition_penalty != 1 or ask.presence_penalty != 0 or ask.frequency_penalty != 0
        )
        self._seen = np.zeros(0, np.int64)
        self._counts: dict[int, int] = {}
        if self.penalises:
            self._seen = np.unique(np.asarray(ask.tokens[: ask.prompt_tokens], np.int64))
            for token in ask.tokens[ask.prompt_tokens :]:
                self._count(token)

    @property
    def plain(self) -> bool:
        """The most likely token and nothing else: the whole batch is answered at once."""
        return self.greedy and not self.penalises and self.ask.logprobs < 0

    def advance(self, token: int) -> None:
        """The token was drawn and emitted."""
        self.index += 1
        if self.penalises:
            self._count(token)

    def penalise(self, row: Floats) -> None:
        """In place: repetition over prompt and answer, presence and frequency over the answer."""
        ask = self.ask
        drawn = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        if ask.repetition_penalty != 1:
            seen = np.concatenate([self._seen, drawn])
            values = row[seen]
            scale = np.float32(ask.repetition_penalty)
            row[seen] = np.where(values > 0, values / scale, values * scale)
        row[drawn] -= np.float32(ask.presence_penalty)
        row[drawn] -= np.float32(ask.frequency_penalty) * counts

    def _count(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1


class Sampler:
    """vocab_tokens: ids at or above it are padding of the model's head and never drawn."""

    def __init__(self, vocab_tokens: int) -> None:
        self._vocab = vocab_tokens
        self._row = np.empty(vocab_tokens, np.float32)
        # Groups of ids a column apart; the ids that fill the last group up weigh 0.
        self._groups = np.zeros((_GROUP, -(-vocab_tokens // _GROUP)), np.float32)
        self._weights = self._groups.reshape(-1)[:vocab_tokens]
        self._ids = np.arange(vocab_tokens)
        # All ids less likely than exp(-tail) times the likeliest weigh less than float32 rounding.
        self._tail = math.log(vocab_tokens) + 24 * math.log(2)
        self._generator = np.random.Philox(key=0)
        self._state: Any = self._generator.state

    def draw(self, logits: Floats, draws: Sequence[tuple[int, Draw]]) -> list[Drawn]:
        """One token for each (row of logits, Draw); logits [B, V] are left as they are."""
        logits = logits[:, : self._vocab]
        likeliest = logits.argmax(axis=1)  # of a NaN, if there is one
        peaks = logits[np.arange(len(logits)), likeliest]
        finite = np.isfinite(peaks) & np.isfinite(logits.min(axis=1))
        return [
            Drawn(FAULT)
            if not finite[row]
            else Drawn(int(likeliest[row]))
            if draw.plain
            else self._draw_row(logits[row], draw)
            for row, draw in draws
        ]

    def uniform(self, seed: int, index: int) -> float:
        """The number in [0, 1) that belongs to token `index` of a stream with this seed."""
        self._state["state"]["key"][:] = (seed & _UINT64, 0)
        self._state["state"]["counter"][:] = (index, 0, 0, 0)
        self._state["buffer_pos"] = 4  # nothing left over from the last draw
        self._generator.state = self._state
        return int(self._generator.random_raw() >> 11) * 2.0**-53

    def _draw_row(self, raw: Floats, draw: Draw) -> Drawn:
        row = raw
        if draw.penalises:
            row = self._row
            np.copyto(row, raw)
            draw.penalise(row)
        if draw.greedy:
            token = int(row.argmax())
        else:
            token = self._pick(row, draw.ask, self.uniform(draw.ask.seed, draw.index))
        wanted = draw.ask.logprobs
        return Drawn(token, _logprobs(raw, token, wanted) if wanted >= 0 else None)

    def _pick(self, row: Floats, ask: Submit, uniform: float) -> int:
        """Temperature, then min_p, top_k, top_p, each over what the rules before it left."""
        temperature = max(ask.temperature, _COLDEST)
        reach = -math.log(ask.min_p) if ask.min_p > 0 else self._tail
        peak = row.max()
        floor = peak - np.float32(min(reach, self._tail) * temperature)
        if ask.top_k > 0:
            floor = max(floor, _at_most_kth(row, ask.top_k))
        reached = row >= floor
        if np.count_nonzero(reached) > _MANY * len(row) and ask.min_p <= 0 and ask.top_k <= 0:
            ids, weights = self._ids, self._weigh_all(row, peak, temperature)
            if ask.top_p >= 1:
                return self._pick_of_all(uniform)
        else:
            ids = np.flatnonzero(reached)
            weights = np.exp((row[ids] - peak) / np.float32(temperature))
        if ask.top_k > 0 or ask.top_p < 1:
            ids, weights = _best(ids, weights, ask.top_k, ask.top_p)
        return int(ids[_locate(weights, uniform)])

    def _weigh_all(self, row: Floats, peak: Any, temperature: float) -> Floats:
        """exp of all logits (the likeliest weighs 1), without a new array."""
        weights = self._weights
        np.subtract(row, peak, out=weights)
        np.multiply(weights, np.float32(1 / temperature), out=weights)
        return np.exp(weights, out=weights)

    def _pick_of_all(self, uniform: float) -> int:
        """Among the weights of all: a group by the groups' sums, then an id in the group."""
        sums = self._groups.sum(axis=0)
        group = _locate(sums, uniform)
        before, own = float(sums[:group].sum(dtype=np.float64)), float(sums[group])
        rest = (uniform * float(sums.sum(dtype=np.float64)) - before) / own
        within = _locate(self._groups[:, group], min(max(rest, 0.0), 1.0))
        return group + len(sums) * within


def _locate(weights: Floats, share: float) -> int:
    """The entry that lifts the sum above `share` of the whole; never one that weighs 0."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, share * sums[-1], side="right"))
    return min(index, int(np.searchsorted(sums, sums[-1], side="left")))


def _best(ids: Ids, weights: Floats, top_k: int, top_p: float) -> tuple[Ids, Floats]:
    """The top_k heaviest (0 = all), of these the fewest that hold top_p of their sum."""
    if not top_k:
        # Ids under this weight hold, all together, less than the part that top_p cuts off.
        mass = float(weights.sum(dtype=np.float64))
        worth = weights >= (1 - top_p) * mass / len(weights)
        ids, weights = ids[worth], weights[worth]
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    ids, weights = ids[order], weights[order]
    if top_p < 1:
        sums = np.cumsum(weights, dtype=np.float64)
        enough = int(np.searchsorted(sums, top_p * (sums[-1] if top_k else mass))) + 1
        ids, weights = ids[:enough], weights[:enough]
    return ids, weights


def _logprobs(raw: Floats, token: int, top: int) -> Logprobs:
    """Of the raw distribution: before temperature and penalties."""
    peak = raw.max()
    total = float(peak) + math.log(float(np.exp(raw - peak).sum(dtype=np.float64)))
    rivals: list[tuple[int, float]] = []
    if top:
        best = np.flatnonzero(raw >= _at_most_kth(raw, top))
        best = best[np.argsort(-raw[best], kind="stable")][:top]
        rivals = [(int(i), float(raw[i]) - total) for i in best]
    return float(raw[token]) - total, rivals


def _at_most_kth(row: Floats, k: int) -> Any:
    """A value that at least k entries reach, and few more: the k-th largest of group maxima."""
    width = len(row) // _GROUP
    if k > width:
        return -np.inf
    maxima = row[: width * _GROUP].reshape(_GROUP, width).max(axis=0)
    return np.partition(maxima, -k)[-k]
