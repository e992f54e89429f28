"""The seam between the step loop and a device: a Batch goes in, logits come out.

An executor owns the graph and the cache memory, and nothing else: which ids, which slots,
which shape, how a token is drawn is decided above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edged.errors import EdgedError
from edged.worker.plan import Gears

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class StepError(EdgedError):
    """One execution failed and may be repeated: rows above past_len never counted."""


class DeviceFault(EdgedError):
    """The device is in a state that only a new process may leave."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one step over the slots lo .. lo+B-1, named as in the graph.

    fresh: rows to append to each slot at past_len; 0 = inactive, its cache must not change.
    """

    lo: int
    input_ids: Ints  # [B, T]
    position_ids: Ints  # [B, T]
    past_len: Ints  # [B, 1]
    logit_idx: Ints  # [B], flat row b*T + last valid
    fresh: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        batch, tokens = self.input_ids.shape
        return batch, tokens


def empty_batch(lo: int, batch: int, tokens: int) -> Batch:
    """All slots inactive: id 0, positions 0 .. T-1, nothing cached."""
    return Batch(
        lo=lo,
        input_ids=np.zeros((batch, tokens), np.int32),
        position_ids=np.repeat(np.arange(tokens, dtype=np.int32)[None], batch, axis=0),
        past_len=np.zeros((batch, 1), np.int32),
        logit_idx=np.arange(batch, dtype=np.int32) * tokens,
        fresh=[0] * batch,
    )


class Executor(Protocol):
    """A loaded model with resident caches. Raises MemoryError, StepError, or is broken."""

    @property
    def gears(self) -> Gears: ...

    @property
    def context(self) -> int:
        """Rows per slot now."""

    def run(self, batch: Batch) -> Floats:
        """Execute and append; logits [B, V], valid until the next run."""

    def repack(self, context: int, rows: Sequence[int]) -> None:
        """Change the rows per slot, keeping the first rows[slot] of each slot."""

    def copy_rows(self, source: int, target: int, rows: int) -> None: ...

    def zero_slot(self, slot: int) -> None: ...

    def close(self) -> None: ...
