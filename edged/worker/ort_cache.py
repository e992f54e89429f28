"""The CPU engine's cache: one NumPy block, windows of which the graph reads without a copy.

Two ways new rows get in: a plain graph hands them out and they are copied to their place; an
in-place graph writes them itself. Knows shapes and slots, not onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from edged.worker.contract import ModelSpec
from edged.worker.executor import Batch

Array = npt.NDArray[Any]
_TYPES: dict[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}


class CacheBlock:
    """[2L, slots, Hk, S, D]: k and v of each layer, a region per slot.

    Zeroed when made, for masked rows weigh 0 and 0 x NaN is NaN. The kernel backs its pages
    only when they are written.
    """

    def __init__(self, spec: ModelSpec, slots: int, context: int) -> None:
        self._spec, self._slots = spec, slots
        self.dtype = np.dtype(_TYPES[spec.cache_dtype])
        self.context = context
        self.array = self._zeros(context)

    def repack(self, context: int, rows: Sequence[int]) -> None:
        array = self._zeros(context)
        for slot, count in enumerate(rows):
            array[:, slot, :, :count] = self.array[:, slot, :, :count]
        self.array, self.context = array, context

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self.array[:, target, :, :rows] = self.array[:, source, :, :rows]

    def zero_slot(self, slot: int) -> None:
        self.array[:, slot] = 0

    def append(self, batch: Batch, new: Array) -> None:
        """new: [2L, B, Hk, T, D]; of each row its first `fresh` positions are kept."""
        for row, count in enumerate(batch.fresh):
            if count:
                past = int(batch.past_len[row, 0])
                self.array[:, batch.lo + row, :, past : past + count] = new[:, row, :, :count]

    @contextmanager
    def spared(self, batch: Batch) -> Iterator[None]:
        """Around an in-place graph: inactive slots of the window get theirs back."""
        tokens = batch.shape[1]
        idle = [batch.lo + row for row, count in enumerate(batch.fresh) if not count]
        kept = [self.array[:, slot, :, :tokens].copy() for slot in idle]
        try:
            yield
        finally:
            for slot, rows in zip(idle, kept, strict=True):
                self.array[:, slot, :, :tokens] = rows

    def _zeros(self, context: int) -> Array:
        spec = self._spec
        shape = (2 * spec.layers, self._slots, spec.kv_heads, context, spec.head_dim)
        return np.zeros(shape, self.dtype)
