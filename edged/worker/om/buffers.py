"""Where a step's inputs and outputs lie: arena pieces, and what of them the host may touch.

On a shared-memory board the host writes and reads the device's own buffers; on a card it has a
pinned copy of the small inputs and of the logits. Nothing is allocated after the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from edged.worker.contract import ModelSpec
from edged.worker.executor import Batch, Floats
from edged.worker.om.arena import Arena, piece_bytes
from edged.worker.om.binding import Device, view
from edged.worker.om.cache import CacheShape, NewRows
from edged.worker.om.codes import DEVICE_TO_HOST, HOST_TO_DEVICE
from edged.worker.om.ports import SMALL_INPUTS, Shape

_INT_BYTES = _FLOAT_BYTES = 4
_OPEN_DIMS = 7  # of the small inputs; each cache input adds one
_SETTER_BYTES = 8  # per open dim
DTYPES: dict[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}


def cache_shape(spec: ModelSpec, slots: int) -> CacheShape:
    dtype = np.dtype(DTYPES[spec.cache_dtype])
    return CacheShape(2 * spec.layers, slots, spec.kv_heads, spec.head_dim, dtype)


def buffer_sizes(
    spec: ModelSpec, shapes: Iterable[Shape], slots: int, work_bytes: int
) -> dict[str, int]:
    """Bytes of every piece of the arena, for all these shapes. The small inputs come first."""
    shapes = list(shapes)
    batch = max(b for b, _, _ in shapes)
    rows = max(b * t for b, t, _ in shapes)
    context = max(s for _, _, s in shapes)
    cache = cache_shape(spec, slots)
    plane = rows * cache.heads * cache.row_bytes
    return {
        "input_ids": rows * _INT_BYTES,
        "position_ids": rows * _INT_BYTES,
        "past_len": batch * _INT_BYTES,
        "logit_idx": batch * _INT_BYTES,
        "kv_pos": context * _INT_BYTES,
        "shape": (_OPEN_DIMS + cache.planes) * _SETTER_BYTES,
        "logits": batch * spec.vocab * _FLOAT_BYTES,
        "new": cache.planes * piece_bytes(plane),
        "work": work_bytes,
        "cache": cache.size_bytes(context),
    }


class Buffers:
    """The step's side of the arena. sizes: as of buffer_sizes."""

    def __init__(self, device: Device, arena: Arena, spec: ModelSpec, slots: int) -> None:
        self._device, self._arena, self._vocab = device, arena, spec.vocab
        self._start = arena.address(SMALL_INPUTS[0])
        last = SMALL_INPUTS[-1]
        self._span = arena.address(last) + arena.size_bytes(last) - self._start
        self._pinned: list[int] = []
        self._host_inputs, self._host_logits = self._start, arena.address("logits")
        if not device.shared:
            self._host_inputs = self._pin(self._span)
            self._host_logits = self._pin(arena.size_bytes("logits"))
        counts = {n: arena.size_bytes(n) // _INT_BYTES for n in SMALL_INPUTS}
        self._ints = {name: self._int_view(name, count) for name, count in counts.items()}
        rows = arena.size_bytes("logits") // (self._vocab * _FLOAT_BYTES)
        size_bytes = rows * self._vocab * _FLOAT_BYTES
        logits: Floats = view(self._host_logits, size_bytes).view(np.float32)
        self._logits = logits.reshape(rows, self._vocab)
        self.plane_stride = arena.size_bytes("new") // cache_shape(spec, slots).planes
        self._write_positions()

    def put(self, batch: Batch) -> None:
        """The small inputs, written (shared memory) or queued (card)."""
        for name, values in (
            ("input_ids", batch.input_ids),
            ("position_ids", batch.position_ids),
            ("past_len", batch.past_len),
            ("logit_idx", batch.logit_idx),
        ):
            self._ints[name][: values.size] = values.reshape(-1)
        if not self._device.shared:
            self._device.copy_later(self._start, self._host_inputs, self._span, HOST_TO_DEVICE)

    def fetch_logits(self, batch: int) -> Floats:
        """[B, V]; on a card they are there only after the stream was synchronised."""
        if not self._device.shared:
            source = self._arena.address("logits")
            size_bytes = batch * self._vocab * _FLOAT_BYTES
            self._device.copy_later(self._host_logits, source, size_bytes, DEVICE_TO_HOST)
        return self._logits[:batch]

    def new_rows(self, batch: int, tokens: int) -> NewRows:
        return NewRows(self._arena.address("new"), self.plane_stride, batch, tokens)

    def close(self) -> None:
        for address in self._pinned:
            self._device.free_pinned(address)

    def _int_view(self, name: str, count: int) -> npt.NDArray[np.int32]:
        place = self._host_inputs + self._arena.address(name) - self._start
        found: npt.NDArray[np.int32] = view(place, count * _INT_BYTES).view(np.int32)
        return found

    def _write_positions(self) -> None:
        """kv_pos is 0 .. S-1 for every S."""
        count = self._arena.size_bytes("kv_pos") // _INT_BYTES
        values = np.arange(count, dtype=np.int32)
        target = self._arena.address("kv_pos")
        self._device.copy(target, int(values.ctypes.data), values.nbytes, HOST_TO_DEVICE)

    def _pin(self, size_bytes: int) -> int:
        self._pinned.append(self._device.pinned(size_bytes))
        return self._pinned[-1]
