"""A loaded model: the container's graph in onnxruntime, reading and writing simulated memory.

Knows shapes, gears and addresses; time, heat and faults are execution.py's.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edged.twin import om
from edged.twin.acl import codes
from edged.twin.acl.codes import Failure
from edged.twin.acl.top import DataBuffer

_BINDINGS = 64  # prepared calls kept; about 1 ms to prepare one
_SETTER_ITEM_BYTES = 8

Locate = Callable[[int, int], int]


@dataclass(frozen=True)
class Port:
    """One input or output as the library describes it. largest_bytes: at the largest gear."""

    name: str
    dtype: np.dtype[Any]
    tensor: om.Tensor
    largest_bytes: int

    def bytes_at(self, gear: om.Gear) -> int:
        return int(np.prod(self.tensor.shape(gear), dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Bound:
    """A prepared call: which gear, and every buffer's place. outputs: (port, address) pairs."""

    gear: om.Gear
    binding: Any
    addresses: tuple[int, ...]
    outputs: list[tuple[Port, int]]


class Interface:
    """Ports and gears of a container, loaded or not."""

    def __init__(self, header: om.Header) -> None:
        self.header = header
        self.gears = header.gears or [{}]
        self.largest = max(self.gears, key=lambda g: sum(_bytes(t, g) for t in header.inputs))
        self.inputs = [self._port(t, t.name) for t in header.inputs]
        self.outputs = [self._port(t, header.output_name(i)) for i, t in enumerate(header.outputs)]
        self.dynamic = bool(header.gears)
        self.declared = [d for t in header.inputs for d in t.dims]
        self.open_dims = [d for d in self.declared if isinstance(d, str)]
        if self.dynamic:
            setter = om.Tensor(codes.DYNAMIC_TENSOR_NAME, "int64", [len(self.open_dims)])
            self.inputs.append(self._port(setter, setter.name))

    @property
    def setter_index(self) -> int:
        return len(self.inputs) - 1

    def values(self, gear: om.Gear) -> tuple[int, ...]:
        """One per open dim, in input order: a group of --dynamic_dims."""
        return tuple(gear[d] for d in self.open_dims)

    def _port(self, tensor: om.Tensor, name: str) -> Port:
        largest = max(_bytes(tensor, g) for g in self.gears)
        return Port(name, np.dtype(tensor.dtype), tensor, largest)


class Model(Interface):
    """owned: device memory that goes with the model."""

    def __init__(self, path: Path, found: om.OmFile, threads: int) -> None:
        super().__init__(found.header)
        self.busy = threading.Lock()
        self.current = self.largest
        self.owned: list[int] = []
        self.costs: dict[tuple[int, float, float], tuple[float, float]] = {}  # execution.py's
        self._bound: dict[Any, Bound] = {}
        self._by_setting: dict[bytes, om.Gear] = {}
        self._settings: dict[int, tuple[bytes, bytes]] = {}  # by id of a gear
        self._by_dims: dict[tuple[int, ...], om.Gear] = {}  # all dims of all inputs
        for gear in self.gears:
            values = self.values(gear)
            self._by_dims[tuple(gear[d] if isinstance(d, str) else d for d in self.declared)] = gear
            # The setter writes 8 bytes per value, 4 into a short buffer.
            wide, narrow = (struct.pack(f"{len(values)}{kind}", *values) for kind in "QI")
            self._settings[id(gear)] = wide, narrow
            self._by_setting |= {wide: gear, narrow: gear}
        self._session = _session(path, found, threads)

    def close(self) -> None:
        self._bound.clear()
        del self._session

    def set_dims(self, dims: Sequence[int], buffer: DataBuffer, locate: Locate) -> None:
        """Write the gear of these dims (all dims of all inputs) into the caller's buffer."""
        if buffer.address == 0:
            raise Failure(codes.GE_DYNAMIC_INPUT_ADDR, "the shape buffer is null")
        gear = self._by_dims.get(tuple(dims))
        if gear is not None:
            self._choose(gear, buffer, locate)
        else:
            self.set_values(self._values_of(dims), buffer, locate)

    def set_values(self, values: Sequence[int], buffer: DataBuffer, locate: Locate) -> None:
        gear = next((g for g in self.gears if self.values(g) == tuple(values)), None)
        if gear is None:
            raise Failure(codes.GE_DYNAMIC_BATCH_SIZE, f"{tuple(values)} is none of the gears")
        self._choose(gear, buffer, locate)

    def _values_of(self, dims: Sequence[int]) -> list[int]:
        """The open ones of all dims. Raises Failure for what is no gear's."""
        if len(dims) != len(self.declared):
            raise Failure(
                codes.GE_DYNAMIC_INPUT_LENGTH,
                f"{len(dims)} dims given, the inputs have {len(self.declared)} in all",
            )
        values = []
        for given, known in zip(dims, self.declared, strict=True):
            if isinstance(known, str):
                values.append(given)
            elif given != known:
                raise Failure(codes.GE_DYNAMIC_INPUT_LENGTH, f"{given} for a fixed dim of {known}")
        return values

    def _choose(self, gear: om.Gear, buffer: DataBuffer, locate: Locate) -> None:
        wide, narrow = self._settings[id(gear)]
        if buffer.size_bytes < len(narrow):
            raise Failure(codes.GE_DYNAMIC_INPUT_LENGTH, f"{buffer.size_bytes} bytes are too few")
        data = wide if buffer.size_bytes >= len(wide) else narrow
        ctypes.memmove(locate(buffer.address, len(data)), data, len(data))
        self.current = gear

    def bind(
        self,
        inputs: Sequence[DataBuffer],
        outputs: Sequence[DataBuffer],
        gear: om.Gear,
        version: int,
        locate: Locate,
    ) -> Bound:
        """The call these buffers make at a gear. Raises Failure where they do not fit.

        version: of the device's allocations, so that nothing checked before is trusted later.
        """
        places = tuple((b.address, b.size_bytes) for b in (*inputs, *outputs))
        key = (version, id(gear), places)
        if key not in self._bound:
            if len(self._bound) >= _BINDINGS:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = self._prepare(inputs, outputs, gear, locate)
        return self._bound[key]

    def run(self, bound: Bound) -> None:
        """Natively, in the calling thread; the GIL is free meanwhile. Raises Failure."""
        try:
            self._session.run_with_iobinding(bound.binding)
        except (RuntimeError, ort.capi.onnxruntime_pybind11_state.InvalidArgument) as error:
            raise Failure(codes.AICORE_EXCEPTION, str(error)[:400]) from None

    def gear_of(self, inputs: Sequence[DataBuffer], locate: Locate) -> om.Gear:
        """What the buffer says; the largest gear when it says nothing known."""
        if not self.dynamic or len(inputs) != len(self.inputs):
            return self.largest
        buffer = inputs[self.setter_index]
        size = min(buffer.size_bytes, _SETTER_ITEM_BYTES * len(self.open_dims))
        if size < 4 * len(self.open_dims):
            raise Failure(codes.GE_DYNAMIC_INPUT_LENGTH, f"the shape buffer has {size} bytes")
        if size < _SETTER_ITEM_BYTES * len(self.open_dims):
            size = 4 * len(self.open_dims)
        setting = ctypes.string_at(locate(buffer.address, size), size)
        return self._by_setting.get(setting, self.largest)

    def _prepare(
        self,
        inputs: Sequence[DataBuffer],
        outputs: Sequence[DataBuffer],
        gear: om.Gear,
        locate: Locate,
    ) -> Bound:
        binding = self._session.io_binding()
        _check_count("input", inputs, self.inputs)
        _check_count("output", outputs, self.outputs)
        found: list[tuple[Port, int]] = []
        for buffer, port in zip(inputs[: len(self.header.inputs)], self.inputs, strict=False):
            place = _place(buffer, port, gear, locate)
            shape = port.tensor.shape(gear)
            binding.bind_input(port.tensor.name, "cpu", 0, port.dtype.type, shape, place)
        for buffer, port in zip(outputs, self.outputs, strict=True):
            place = _place(buffer, port, gear, locate)
            shape = port.tensor.shape(gear)
            binding.bind_output(port.tensor.name, "cpu", 0, port.dtype.type, shape, place)
            found.append((port, place))
        addresses = tuple(b.address for b in (*inputs, *outputs))
        return Bound(gear, binding, addresses, found)


def poison(bound: Bound, row: int) -> None:
    """NaN in every floating-point output; row: of the first axis, -1 = all."""
    for port, place in bound.outputs:
        shape = port.tensor.shape(bound.gear)
        if port.dtype.kind == "f" and row < shape[0]:
            memory = (ctypes.c_uint8 * port.bytes_at(bound.gear)).from_address(place)
            values = np.ctypeslib.as_array(memory).view(port.dtype).reshape(shape)
            values[row if row >= 0 else slice(None)] = np.nan


def _place(buffer: DataBuffer, port: Port, gear: om.Gear, locate: Locate) -> int:
    needed = port.bytes_at(gear)
    if buffer.size_bytes < needed:
        raise Failure(
            codes.GE_PARAM_INVALID,
            f"{port.name}: the buffer has {buffer.size_bytes} bytes, this gear needs {needed}",
        )
    return locate(buffer.address, needed)


def _check_count(kind: str, buffers: Sequence[DataBuffer], ports: Sequence[Port]) -> None:
    if len(buffers) != len(ports):
        raise Failure(
            codes.GE_PARAM_INVALID, f"{len(buffers)} {kind} buffers, the model has {len(ports)}"
        )


def _bytes(tensor: om.Tensor, gear: om.Gear) -> int:
    return int(np.prod(tensor.shape(gear), dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


def _session(path: Path, found: om.OmFile, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent)
    )
    try:
        return ort.InferenceSession(
            om.located_graph(path, found), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001 - onnx and onnxruntime have a dozen kinds for a bad graph
        raise Failure(codes.GE_LOAD_MODEL, str(error)[:400]) from None
