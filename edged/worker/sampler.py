"""Draws token ids from full logits, in NumPy; knows no slots, no cache and no clock.

The random number of a token depends on (seed, token index) alone, so a stream continued
elsewhere draws the same numbers. A row that is not finite is a fault, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edged.wire import Submit

FAULT = -1
_BLOCK = 64
_UINT64 = (1 << 64) - 1
Floats = npt.NDArray[np.float32]
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
        self._weights = np.empty(vocab_tokens, np.float32)
        self._blocks = np.arange(0, vocab_tokens, _BLOCK)
        self._generator = np.random.Philox(key=0)
        self._state: Any = self._generator.state

    def draw(self, logits: Floats, draws: Sequence[tuple[int, Draw]]) -> list[Drawn]:
        """One token for each (row of logits, Draw); logits [B, V] are left as they are."""
        logits = logits[:, : self._vocab]
        finite = np.isfinite(logits.sum(axis=1))
        likeliest = logits.argmax(axis=1)
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
        return Drawn(token, self._logprobs(raw, token, wanted) if wanted >= 0 else None)

    def _logprobs(self, raw: Floats, token: int, top: int) -> Logprobs:
        """Of the raw distribution: before temperature and penalties."""
        peak = raw.max()
        np.exp(np.subtract(raw, peak, out=self._weights), out=self._weights)
        total = float(peak) + float(np.log(self._weights.sum()))
        best = np.argpartition(raw, -top)[-top:] if top else np.zeros(0, np.int64)
        best = best[np.lexsort((best, -raw[best]))]
        rivals = [(int(i), float(raw[i]) - total) for i in best]
        return float(raw[token]) - total, rivals

    def _pick(self, row: Floats, ask: Submit, uniform: float) -> int:
        """Temperature, then min_p, top_k, top_p, each over what the rules before it left."""
        weights = self._weights
        np.subtract(row, row.max(), out=weights)
        np.divide(weights, np.float32(max(ask.temperature, 1e-6)), out=weights)
        np.exp(weights, out=weights)  # the likeliest weighs 1
        floor = ask.min_p
        if 0 < ask.top_k < len(weights):
            floor = max(floor, float(np.partition(weights, -ask.top_k)[-ask.top_k]))
        if floor <= 0 and ask.top_p >= 1:
            return self._search(weights, uniform)
        ids = np.flatnonzero(weights >= floor) if floor > 0 else np.arange(len(weights))
        kept = weights[ids]
        mass = float(kept.sum())
        if ask.top_p < 1:
            # All ids under this weight together hold less than the part that top_p cuts off.
            worth = kept >= (1 - ask.top_p) * mass / len(kept)
            ids, kept = ids[worth], kept[worth]
        order = np.argsort(-kept, kind="stable")
        if ask.top_k > 0 and len(order) > ask.top_k:  # equals of the last one
            order = order[: ask.top_k]
            mass = float(kept[order].sum())
        ids, sums = ids[order], np.cumsum(kept[order], dtype=np.float64)
        if ask.top_p < 1:
            enough = int(np.searchsorted(sums, ask.top_p * mass)) + 1
            ids, sums = ids[:enough], sums[:enough]
        return int(ids[_locate(sums, uniform * sums[-1])])

    def _search(self, weights: Floats, uniform: float) -> int:
        """Inverse of the cumulative sum, block by block: no sum over the whole vocabulary."""
        sums = np.cumsum(np.add.reduceat(weights, self._blocks), dtype=np.float64)
        target = uniform * sums[-1]
        block = _locate(sums, target)
        before = sums[block - 1] if block else 0.0
        start = block * _BLOCK
        inner = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
        return start + _locate(inner, target - before)


def _locate(sums: npt.NDArray[np.float64], target: float) -> int:
    """Index of the entry that lifts the sum above target; never one of weight 0."""
    index = int(np.searchsorted(sums, target, side="right"))
    return index if index < len(sums) else int(np.searchsorted(sums, sums[-1], side="left"))
