"""One stream in a slot: what has been said, what is left to compute, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass

from edged.wire import Row
from edged.worker.contract import ModelSpec
from edged.worker.plan import SlotView
from edged.worker.sampler import FAULT, Draw, Drawn
from edged.worker.slots import Slot


@dataclass
class Stream:
    """slot.tokens are its ids, the first slot.rows of them computed.

    served: for turns under a lowered batch; order: of arrival; started: its first step has
    been planned; cached_tokens: to be told with the first row.
    """

    id: int
    slot: Slot
    draw: Draw
    served: int
    order: int
    started: bool = False
    cached_tokens: int = -1

    def view(self) -> SlotView:
        slot = self.slot
        left = len(slot.tokens) - slot.rows
        return SlotView(slot.index, slot.rows, left, self.served, self.order)

    def accept(self, drawn: Drawn, spec: ModelSpec) -> Row:
        """Take the next token; the news, with `finish` where it ends the stream."""
        slot, ask = self.slot, self.draw.ask
        if drawn.token == FAULT:
            return self.end("row_fault", "the model's output is not finite")
        if drawn.token in spec.eos_ids and not ask.ignore_eos:
            return self.end("stop")
        slot.tokens.append(drawn.token)
        self.draw.advance(drawn.token)
        self.served += 1
        full = len(slot.tokens) >= spec.context_tokens
        finish = "length" if full or self.draw.index >= ask.max_tokens else ""
        logprobs = [drawn.logprobs] if drawn.logprobs is not None else []
        return Row(self.id, [drawn.token], logprobs, finish, "", self._first_news())

    def end(self, finish: str, detail: str = "") -> Row:
        """A row without a token that ends the stream."""
        return Row(self.id, [], [], finish, detail, self._first_news())

    def _first_news(self) -> int:
        """cached_tokens with the first row of a stream, -1 afterwards."""
        cached, self.cached_tokens = self.cached_tokens, -1
        return cached
