"""Executor on a compiled model (.om): the same seam as ort.py, on the NPU or its twin.

Everything a step touches was carved from the arena at start; a step copies its few inputs,
chooses the gear, executes, and waits once, with the GIL free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from edged.worker.contract import ContractError, ModelSpec, cache_names
from edged.worker.executor import Batch, Floats, StepError
from edged.worker.om.arena import Arena, layout
from edged.worker.om.binding import Dataset, Device
from edged.worker.om.buffers import Buffers, buffer_sizes, cache_shape
from edged.worker.om.cache import Cache, CardCache, SharedCache
from edged.worker.om.codes import DYNAMIC_TENSOR_NAME, OutOfDeviceMemory
from edged.worker.om.load import admit, load, mapped
from edged.worker.om.ports import Shape, match, usable_gears
from edged.worker.plan import Gears
from edged.worker.rules import log

_WINDOWS = 32  # prepared input sets kept, one per window of slots and context
_STARVED_STEPS = 2  # in a row without memory: tried once more, then the worker gives up


class OmExecutor:
    """See edged.worker.executor.Executor. Raises DeviceError kinds besides what the seam names."""

    def __init__(self, spec: ModelSpec, slots: int, device: Device) -> None:
        started_s = time.monotonic()
        self._spec, self._device = spec, device
        self.gears: Gears = usable_gears(spec.gears, slots, spec.context_tokens)
        self._shape = cache_shape(spec, slots)
        self._inputs: dict[tuple[int, int, int], Dataset] = {}
        self._starved_steps = 0
        with ExitStack() as undo:
            self._load(slots, undo)
            loaded_s = time.monotonic()
            self._prepare(slots, undo)
            self._closing = undo.pop_all()
        log(
            f"{device.soc}: arena {self._arena.total_bytes >> 20} MiB, loaded in "
            f"{loaded_s - started_s:.2f} s, prepared in {time.monotonic() - loaded_s:.2f} s"
        )

    @property
    def context(self) -> int:
        return self._cache.context

    @property
    def arena(self) -> Arena:
        """For accounting."""
        return self._arena

    def run(self, batch: Batch) -> Floats:
        size, tokens = batch.shape
        self._device.attach()
        self._buffers.put(batch)
        self._launch(batch.lo, (size, tokens, self.context))
        if self._device.shared:
            # The rows may only be read once they are there.
            self._device.synchronize()
            self._append(batch)
            return self._buffers.fetch_logits(size)
        self._append(batch)
        logits = self._buffers.fetch_logits(size)
        self._device.synchronize()
        return logits

    def repack(self, context: int, rows: Sequence[int]) -> None:
        self._device.attach()
        self._cache.repack(context, rows)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._device.attach()
        self._cache.copy_rows(source, target, rows)

    def zero_slot(self, slot: int) -> None:
        self._device.attach()
        self._cache.zero_slot(slot)

    def close(self) -> None:
        """In the documented order: data sets, model, memory, and what `also_close` was told."""
        self._device.synchronize()
        for dataset in self._inputs.values():
            dataset.close()
        self._closing.close()

    def also_close(self, last: Callable[[], None]) -> None:
        """Something that is to be closed after everything else: the device."""
        rest = self._closing.pop_all()
        self._closing.callback(last)
        self._closing.push(rest)

    # --- one step --------------------------------------------------------------------------------

    def _launch(self, lo: int, shape: Shape) -> None:
        """Queue the model over the slots lo .. at this shape. A lack of memory is worth another
        try: nothing was counted yet, and another process may have had it for a moment."""
        inputs = self._window(lo, shape[0], shape[2])
        try:
            # Without it the largest gear runs, and the last one stays in the buffer.
            self._model.set_dims(inputs.handle, self._ports.shape_input, self._dims[shape])
            self._model.execute_later(inputs.handle, self._outputs.handle)
        except OutOfDeviceMemory as error:
            self._starved_steps += 1
            if self._starved_steps >= _STARVED_STEPS:
                raise
            raise StepError(str(error)) from None
        self._starved_steps = 0

    def _append(self, batch: Batch) -> None:
        new = self._buffers.new_rows(*batch.shape)
        for row, count in enumerate(batch.fresh):
            if count:
                past = int(batch.past_len[row, 0])
                self._cache.append(new, row, batch.lo + row, past, count)

    def _window(self, lo: int, batch: int, context: int) -> Dataset:
        """Input buffers whose cache pointers begin at slot lo; prepared once."""
        key = (lo, batch, context)
        if key not in self._inputs:
            if len(self._inputs) >= _WINDOWS:
                self._inputs.pop(next(iter(self._inputs))).close()
            shape = self._shape
            row, base = context * shape.row_bytes, self._arena.address("cache")
            size = batch * shape.heads * row
            windows = {
                past: (base + shape.unit(plane, lo) * row, size)
                for plane, (past, _) in enumerate(cache_names(self._spec.layers))
            }
            self._inputs[key] = Dataset(self._device, self._places(self._ports.inputs, windows))
        return self._inputs[key]

    def _places(
        self, names: Sequence[str], windows: dict[str, tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """(address, bytes) of each of the model's tensors, in its order."""
        arena, stride = self._arena, self._arena.size_bytes("new") // self._shape.planes
        for plane, (_, new) in enumerate(cache_names(self._spec.layers)):
            windows = {**windows, new: (arena.address("new") + plane * stride, stride)}
        pieces = {DYNAMIC_TENSOR_NAME: "shape"}
        return [
            windows[name]
            if name in windows
            else (arena.address(pieces.get(name, name)), arena.size_bytes(pieces.get(name, name)))
            for name in names
        ]

    # --- start -----------------------------------------------------------------------------------

    def _load(self, slots: int, undo: ExitStack) -> None:
        """Arena and model, admitted together before either takes memory."""
        spec, device = self._spec, self._device
        with mapped(device, spec.graph_path) as om:
            sizes = buffer_sizes(spec, _used(self.gears), slots, om.work_bytes)
            admit(device, om.weight_bytes, layout(sizes)[1])
            self._arena = Arena(device, sizes)
            undo.callback(self._arena.close)
            self._model = load(device, om, (self._arena.address("work"), om.work_bytes))
            undo.callback(self._model.unload)

    def _prepare(self, slots: int, undo: ExitStack) -> None:
        """Everything a step touches."""
        model = self._model
        self._ports = match(self._spec, model.inputs, model.outputs, model.gears, _used(self.gears))
        self._check_setter()
        self._buffers = Buffers(self._device, self._arena, self._spec, slots)
        undo.callback(self._buffers.close)
        self._cache = self._make_cache()
        self._outputs = Dataset(self._device, self._places(self._ports.outputs, {}))
        undo.callback(self._outputs.close)
        self._dims = {s: _setting(dims) for s, dims in self._ports.dims.items()}

    def _make_cache(self) -> Cache:
        context = self.gears.context[0]
        if self._device.shared:
            memory, new = self._arena.view("cache"), self._arena.view("new")
            return SharedCache(self._shape, memory, new, context)
        self._arena.fill("cache", 0)
        return CardCache(self._shape, self._device, self._arena.address("cache"), context)

    def _check_setter(self) -> None:
        port = self._model.inputs[self._ports.shape_input]
        if port.size_bytes > self._arena.size_bytes("shape"):
            raise ContractError(
                f"{self._spec.graph_path}: {port.name} takes {port.size_bytes} bytes, more than "
                "the graph has open sizes; run `edged export --target om` again"
            )


def _used(gears: Gears) -> list[Shape]:
    """All shapes the step loop may ask for."""
    decode = [(b, 1, s) for b in gears.batch for s in gears.context]
    return decode + [(1, t, s) for t in gears.tokens for s in gears.context if t > 1]


def _setting(dims: Sequence[int]) -> dict[str, Any]:
    return {"name": "", "dimCount": len(dims), "dims": list(dims)}
