"""The resident KV cache [2L, slots, Hk, S, D] in the arena: append, copy, zero, re-pack.

Two ways to the same rows: NumPy views where CPU and NPU share memory, device copies on a card.
S may change within the memory of the largest S; which rows count is known above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edged.worker.om.binding import Bytes, Device
from edged.worker.om.codes import DEVICE_TO_DEVICE


@dataclass(frozen=True)
class CacheShape:
    """planes: 2L (k and v of each layer); unit: the rows of one plane, slot and head."""

    planes: int
    slots: int
    heads: int
    head_dim: int
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Of one token in one unit."""
        return self.head_dim * self.dtype.itemsize

    @property
    def units(self) -> int:
        return self.planes * self.slots * self.heads

    def size_bytes(self, context: int) -> int:
        return self.units * context * self.row_bytes

    def unit(self, plane: int, slot: int, head: int = 0) -> int:
        return (plane * self.slots + slot) * self.heads + head


@dataclass(frozen=True)
class NewRows:
    """Where a step of shape (B, T) left its rows: one output buffer per plane."""

    address: int
    plane_stride: int  # bytes from one plane's buffer to the next
    batch: int
    tokens: int


class Cache(Protocol):
    """One of the two. Lengths in rows; nothing here allocates device memory."""

    context: int

    def append(self, new: NewRows, row: int, slot: int, past: int, count: int) -> None:
        """The first `count` new rows of a batch row become rows past .. of a slot."""

    def copy_rows(self, source: int, target: int, rows: int) -> None: ...

    def zero_slot(self, slot: int) -> None: ...

    def repack(self, context: int, rows: Sequence[int]) -> None:
        """Change S; keeps the first rows[slot] of each slot, zeroes the rest."""


class SharedCache:
    """For a CPU that sees the device's memory. memory: of the largest context."""

    def __init__(self, shape: CacheShape, memory: Bytes, new: Bytes, context: int) -> None:
        self._shape = shape
        self._memory = memory.view(shape.dtype)
        self._new = new
        self._memory[:] = 0  # 0 x NaN is NaN: masked rows must be finite
        self.context = context
        self._blocks: dict[int, npt.NDArray[Any]] = {}  # views, by context
        self._outputs: dict[NewRows, npt.NDArray[Any]] = {}  # views, by shape

    def append(self, new: NewRows, row: int, slot: int, past: int, count: int) -> None:
        rows = self._rows(new)[:, row, :, :count]
        self._block(self.context)[:, slot, :, past : past + count] = rows

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        block = self._block(self.context)
        block[:, target, :, :rows] = block[:, source, :, :rows]

    def zero_slot(self, slot: int) -> None:
        self._block(self.context)[:, slot] = 0

    def repack(self, context: int, rows: Sequence[int]) -> None:
        shape, old = self._shape, self.context
        flat = self._memory
        for unit in _order(shape.units, growing=context > old):
            count = rows[unit // shape.heads % shape.slots] * shape.head_dim
            target, source = unit * context * shape.head_dim, unit * old * shape.head_dim
            flat[target : target + count] = flat[source : source + count]
            flat[target + count : target + context * shape.head_dim] = 0
        self.context = context

    def _block(self, context: int) -> npt.NDArray[Any]:
        if context not in self._blocks:
            shape = self._shape
            size = shape.units * context * shape.head_dim
            axes = shape.planes, shape.slots, shape.heads, context, shape.head_dim
            self._blocks[context] = self._memory[:size].reshape(axes)
        return self._blocks[context]

    def _rows(self, new: NewRows) -> npt.NDArray[Any]:
        """[2L, B, Hk, T, D] over the output buffers."""
        if new in self._outputs:
            return self._outputs[new]
        shape = self._shape
        item = shape.dtype.itemsize
        row = shape.head_dim * item
        axes = shape.planes, new.batch, shape.heads, new.tokens, shape.head_dim
        head = new.tokens * row
        strides = new.plane_stride, shape.heads * head, head, row, item
        rows: npt.NDArray[Any] = np.ndarray(axes, shape.dtype, self._new, strides=strides)
        self._outputs[new] = rows
        return rows


class CardCache:
    """For a card: everything is queued on the device's stream, in order with the steps."""

    def __init__(self, shape: CacheShape, device: Device, address: int, context: int) -> None:
        self._shape, self._device, self._base = shape, device, address
        self.context = context
        device.fill(address, 0, shape.size_bytes(context))

    def append(self, new: NewRows, row: int, slot: int, past: int, count: int) -> None:
        shape, size = self._shape, count * self._shape.row_bytes
        piece = new.tokens * shape.row_bytes
        for plane in range(shape.planes):
            source = new.address + plane * new.plane_stride + row * shape.heads * piece
            for head in range(shape.heads):
                target = self._place(shape.unit(plane, slot, head), past)
                self._device.copy_later(target, source + head * piece, size, DEVICE_TO_DEVICE)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        shape, size = self._shape, rows * self._shape.row_bytes
        for plane in range(shape.planes):
            for head in range(shape.heads):
                to = self._place(shape.unit(plane, target, head), 0)
                start = self._place(shape.unit(plane, source, head), 0)
                self._device.copy_later(to, start, size, DEVICE_TO_DEVICE)

    def zero_slot(self, slot: int) -> None:
        shape = self._shape
        size = shape.heads * self.context * shape.row_bytes
        for plane in range(shape.planes):
            self._device.fill_later(self._place(shape.unit(plane, slot), 0), 0, size)

    def repack(self, context: int, rows: Sequence[int]) -> None:
        shape, old, row = self._shape, self.context, self._shape.row_bytes
        for unit in _order(shape.units, growing=context > old):
            count = rows[unit // shape.heads % shape.slots]
            target = self._base + unit * context * row
            source = self._base + unit * old * row
            for at, size in pieces(count * row, target - source):
                self._device.copy_later(target + at, source + at, size, DEVICE_TO_DEVICE)
            if context > count:
                self._device.fill_later(target + count * row, 0, (context - count) * row)
        self.context = context
        self._device.synchronize()

    def _place(self, unit: int, row: int) -> int:
        return self._base + (unit * self.context + row) * self._shape.row_bytes


def _order(units: int, growing: bool) -> Sequence[int]:
    """So that no unit is overwritten before it has moved."""
    return range(units - 1, -1, -1) if growing else range(units)


def pieces(size: int, shift: int) -> Iterator[tuple[int, int]]:
    """(start, size) of copies that move `size` bytes by `shift` without overlapping themselves,
    in an order in which none overwrites what is still to be read."""
    if shift == 0 or size == 0:
        return
    step = min(size, abs(shift))
    starts = range(0, size, step)
    for start in reversed(starts) if shift > 0 else starts:
        yield start, min(step, size - start)
