"""The slot table: which ids have valid rows in which slot, and where a new stream goes.

Free slots keep the ids of their last stream, so that a follow-up computes only what is new.
Never touches the cache itself: the loop copies rows where `donor` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_COMPARE_TOKENS = 64
MIN_COPY_TOKENS = 16  # fewer shared rows are computed, not copied from another slot


@dataclass
class Slot:
    """tokens[:rows] are the ids whose rows are valid; a busy slot's tokens are its stream's."""

    index: int
    tokens: list[int] = field(default_factory=list)
    rows: int = 0
    busy: bool = False
    freed: int = 0  # the larger, the later

    def shared(self, tokens: Sequence[int]) -> int:
        """How many leading tokens have valid rows here; the last one is always left over,
        because its logits are wanted."""
        limit = min(self.rows, len(tokens) - 1)
        for start in range(0, limit, _COMPARE_TOKENS):
            end = min(start + _COMPARE_TOKENS, limit)
            if self.tokens[start:end] != tokens[start:end]:
                return next(i for i in range(start, end) if self.tokens[i] != tokens[i])
        return max(limit, 0)


class SlotTable:
    """All slots of an executor. Every method is a state change without I/O."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self._releases = 0

    @property
    def free_count(self) -> int:
        return sum(not slot.busy for slot in self.slots)

    def take(self, tokens: list[int]) -> Slot | None:
        """Give a free slot to a stream and keep the rows it shares; None when all are busy.

        In this order: the window of busy slots stays narrow; no rows of other conversations
        are lost; the longest shared prefix; the slot freed longest ago.
        """
        free = [slot for slot in self.slots if not slot.busy]
        if not free:
            return None
        busy = [slot.index for slot in self.slots if slot.busy]

        def cost(slot: Slot) -> tuple[int, bool, int, int, int]:
            shared = slot.shared(tokens)
            widening = max(min(busy) - slot.index, slot.index - max(busy), 0) if busy else 0
            return widening, slot.rows > shared, -shared, slot.freed, slot.index

        slot = min(free, key=cost)
        slot.rows = slot.shared(tokens)
        slot.tokens = tokens
        slot.busy = True
        return slot

    def donor(self, slot: Slot) -> tuple[Slot, int] | None:
        """Another slot whose rows are worth copying into this one, and how many of them."""
        shared, other = max(
            ((s.shared(slot.tokens), s) for s in self.slots if s is not slot),
            key=lambda pair: pair[0],
            default=(0, slot),
        )
        return (other, shared) if shared >= slot.rows + MIN_COPY_TOKENS else None

    def move(self, source: Slot, target: Slot) -> None:
        """Hand a stream to a free slot whose rows have been copied; the old slot is empty."""
        target.tokens, target.rows, target.busy = source.tokens, source.rows, True
        source.tokens, source.rows = [], 0
        self._release(source)

    def release(self, slot: Slot) -> None:
        """Free a slot; its valid rows stay for whoever shares them."""
        slot.tokens = slot.tokens[: slot.rows]
        self._release(slot)

    def forget(self, slot: Slot) -> None:
        """Free a slot whose rows cannot be trusted (and which has been zeroed)."""
        slot.tokens, slot.rows = [], 0
        self._release(slot)

    def truncate(self, context: int) -> None:
        """The slots are about to hold only `context` rows each; busy ones fit by plan."""
        for slot in self.slots:
            if not slot.busy and slot.rows > context:
                slot.tokens, slot.rows = slot.tokens[:context], context

    def _release(self, slot: Slot) -> None:
        self._releases += 1
        slot.busy, slot.freed = False, self._releases
