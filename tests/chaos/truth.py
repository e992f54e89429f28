"""Truth: requests whose text no rounding can change, and that text, from a run of the model alone.

The engines round differently (by about 1e-4 in a logit), so a draw that is nearly a tie may go
either way. Prompts are tried until no draw of theirs is. Knows nothing of daemons.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edged.text.model import TextModel
from edged.wire import Submit
from edged.worker.contract import read_spec
from edged.worker.executor import Floats, empty_batch
from edged.worker.ort import OrtExecutor
from edged.worker.rows import put_row
from edged.worker.sampler import Draw, Sampler

TOKENS = 240
TOP_K = 2  # of those that are drawn: then the distance to a tie is known
SURE = 6e-4  # nats, and share of the draw
_ROUNDS = 60


@dataclass(frozen=True)
class Known:
    """temperature 0 = greedy, else drawn from the TOP_K best."""

    prompt: str
    temperature: float
    seed: int
    model: TextModel
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]

    def text(self, tokens: int) -> str:
        """What an answer of so many tokens reads."""
        assert tokens <= TOKENS
        detokenizer = self.model.detokenizer(self.prompt_ids)
        shown = "".join(detokenizer.push((one,)) for one in self.ids[:tokens])
        return shown + detokenizer.flush()


def known(folder: Path, prompts: Sequence[str]) -> list[Known]:
    """One per prompt, greedy and drawn in turn. folder: the model exported for the CPU in fp32.

    Runs an event loop of its own.
    """
    text = TextModel.load(folder, "")
    model = _Model(folder, len(prompts))
    found: dict[int, Known] = {}
    for attempt in range(_ROUNDS):
        missing = [i for i in range(len(prompts)) if i not in found]
        if not missing:
            return [found[i] for i in range(len(prompts))]
        words = [f"{prompts[i]} {attempt}" if attempt else prompts[i] for i in missing]
        ids = [list(asyncio.run(text.prompt_ids(one))) for one in words]
        asks = [_ask(ids[at], 0.8 * (i % 2), i) for at, i in enumerate(missing)]
        for at, drawn in enumerate(model.run(asks)):
            if drawn:
                ask = asks[at]
                found[missing[at]] = Known(
                    words[at], ask.temperature, ask.seed, text, tuple(ids[at]), tuple(drawn)
                )
    raise AssertionError("no prompt without a near tie was found")


def _ask(ids: list[int], temperature: float, seed: int) -> Submit:
    return Submit(
        stream=1,
        tokens=ids,
        prompt_tokens=len(ids),
        max_tokens=TOKENS,
        temperature=temperature,
        top_k=TOP_K if temperature else 0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed,
        logprobs=-1,
        ignore_eos=True,
    )


class _Model:
    def __init__(self, folder: Path, slots: int) -> None:
        spec = read_spec(folder)
        self._context = spec.context_tokens
        self._executor = OrtExecutor(spec, slots, 2)
        self._executor.repack(next(c for c in self._executor.gears.context if c > TOKENS + 64), [])
        self._sampler = Sampler(spec.vocab_tokens)

    def run(self, asks: Sequence[Submit]) -> list[list[int]]:
        """TOKENS ids for each, or none where a draw was nearly a tie."""
        drawn: list[list[int]] = [[] for _ in asks]
        draws = [Draw(ask) for ask in asks]
        sure = [True] * len(asks)
        past = [len(ask.tokens) for ask in asks]
        logits = np.stack([self._prefilled(slot, ask.tokens) for slot, ask in enumerate(asks)])
        for _ in range(TOKENS):
            batch = empty_batch(0, len(asks), 1)
            for slot, draw in enumerate(draws):
                sure[slot] = sure[slot] and self._margin(logits[slot], draw) > SURE
                token = self._sampler.draw(logits, [(slot, draw)])[0].token
                draw.advance(token)
                drawn[slot].append(token)
                put_row(batch, slot, [token], past[slot], self._context)
                past[slot] += 1
            logits = self._executor.run(batch).copy()
        return [ids if good else [] for ids, good in zip(drawn, sure, strict=True)]

    def _prefilled(self, slot: int, ids: Sequence[int]) -> Floats:
        batch = empty_batch(slot, 1, len(ids))
        put_row(batch, 0, ids, 0, self._context)
        return np.array(self._executor.run(batch)[0])

    def _margin(self, row: Floats, draw: Draw) -> float:
        """How near another token was to be drawn."""
        first, second, third = (float(value) for value in np.sort(row)[:-4:-1])
        if draw.greedy:
            return first - second
        share = 1 / (1 + math.exp(-(first - second) / draw.ask.temperature))
        drawn = self._sampler.uniform(draw.ask.seed, draw.index)
        return min(first - second, second - third, abs(drawn - share))
