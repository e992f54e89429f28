"""The only file that speaks to pyACL: every code becomes an exception, every wait has an end.

Owns context and stream; knows nothing of graphs and caches. The context is set in every thread
that calls, for the library keeps it per thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edged.errors import EngineFault
from edged.worker.om import codes
from edged.worker.om.codes import DeviceError, failure

WAIT_S = 120.0  # far beyond any step; the daemon's own deadline comes first
Bytes = npt.NDArray[np.uint8]


def library() -> Any:
    """The vendor's module, or the simulated one where EDGED_TWIN names a board."""
    if os.environ.get("EDGED_TWIN"):
        from edged.twin import acl
    else:
        try:
            import acl  # type: ignore[import-not-found, no-redef]
        except ImportError as error:
            raise EngineFault(
                f"cannot import acl ({error}); source /usr/local/Ascend/ascend-toolkit/set_env.sh "
                "before starting, or try `edged run --twin`"
            ) from None
    return acl


@dataclass(frozen=True)
class Port:
    """A model's input or output: dims with -1 where gears decide, size at the largest gear."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    size_bytes: int


class Device:
    """One device, one context, one stream. Raises DeviceError kinds from everything."""

    def __init__(self, acl: Any, device: int = 0) -> None:
        self.acl = acl
        self._device = device
        self._thread = threading.local()
        code = acl.init()
        if code != codes.REPEAT_INITIALIZE:  # documented as harmless
            self.check(code, "acl.init")
        self.check(acl.rt.set_device(device), "rt.set_device")
        self._context = self.value(acl.rt.create_context(device), "rt.create_context")
        self._thread.attached = True
        self.stream: int = self.value(acl.rt.create_stream(), "rt.create_stream")
        self.shared = self.value(acl.rt.get_run_mode(), "rt.get_run_mode") == codes.RUN_MODE_DEVICE
        # By default a hung kernel would block for up to 18 minutes.
        self.check(acl.rt.set_op_execute_time_out(int(WAIT_S)), "rt.set_op_execute_time_out")

    @property
    def soc(self) -> str:
        return str(self.acl.get_soc_name())

    def attach(self) -> None:
        """Make this device's context the calling thread's, once."""
        if not getattr(self._thread, "attached", False):
            self.check(self.acl.rt.set_context(self._context), "rt.set_context")
            self._thread.attached = True

    def check(self, code: int, call: str, size_bytes: int = 0) -> None:
        if code != 0:
            raise self._failure(code, call, size_bytes)

    def value(self, result: tuple[Any, ...], call: str, size_bytes: int = 0) -> Any:
        """The value of (value, ret); several values as a tuple."""
        *values, code = result
        if code != 0:
            raise self._failure(code, call, size_bytes)
        return values[0] if len(values) == 1 else tuple(values)

    def _failure(self, code: int, call: str, size_bytes: int) -> DeviceError:
        return failure(call, code, self.acl.get_recent_err_msg() or "", size_bytes)

    # --- memory ----------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        self.attach()
        free, total = self.value(self.acl.rt.get_mem_info(codes.MEM_HBM), "rt.get_mem_info")
        return free, total

    def malloc(self, size_bytes: int) -> int:
        self.attach()
        made = self.acl.rt.malloc(size_bytes, codes.MALLOC_HUGE_FIRST)
        return int(self.value(made, "rt.malloc", size_bytes))

    def free(self, address: int) -> None:
        self.attach()
        self.check(self.acl.rt.free(address), "rt.free")

    def pinned(self, size_bytes: int) -> int:
        """Host memory the device copies from and to without a detour."""
        self.attach()
        return int(self.value(self.acl.rt.malloc_host(size_bytes), "rt.malloc_host", size_bytes))

    def free_pinned(self, address: int) -> None:
        self.attach()
        self.check(self.acl.rt.free_host(address), "rt.free_host")

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        self.attach()
        code = self.acl.rt.memset(address, size_bytes, value, size_bytes)
        self.check(code, "rt.memset", size_bytes)

    def copy(self, target: int, source: int, size_bytes: int, kind: int) -> None:
        """At once."""
        self.attach()
        code = self.acl.rt.memcpy(target, size_bytes, source, size_bytes, kind)
        self.check(code, "rt.memcpy", size_bytes)

    def copy_later(self, target: int, source: int, size_bytes: int, kind: int) -> None:
        """When the stream comes to it."""
        code = self.acl.rt.memcpy_async(target, size_bytes, source, size_bytes, kind, self.stream)
        if code != 0:
            raise self._failure(code, "rt.memcpy_async", size_bytes)

    def fill_later(self, address: int, value: int, size_bytes: int) -> None:
        code = self.acl.rt.memset_async(address, size_bytes, value, size_bytes, self.stream)
        self.check(code, "rt.memset_async", size_bytes)

    def synchronize(self, wait_s: float = WAIT_S) -> None:
        """Until the stream is idle; the GIL is free meanwhile. A time-out is fatal: what hangs
        cannot be taken back."""
        self.attach()
        code = self.acl.rt.synchronize_stream_with_timeout(self.stream, int(wait_s * 1000))
        self.check(code, "rt.synchronize_stream_with_timeout")

    def close(self) -> None:
        """In the documented order; never from a destructor."""
        self.attach()
        self.check(self.acl.rt.destroy_stream(self.stream), "rt.destroy_stream")
        self.check(self.acl.rt.destroy_context(self._context), "rt.destroy_context")
        self.check(self.acl.rt.reset_device(self._device), "rt.reset_device")
        self.check(self.acl.finalize(), "acl.finalize")


class Model:
    """A loaded model, described. Unload it before the device is closed."""

    def __init__(self, device: Device, model_id: int) -> None:
        self._device, self._id = device, model_id
        mdl = device.acl.mdl
        desc = mdl.create_desc()
        try:
            device.check(mdl.get_desc(desc, model_id), "mdl.get_desc")
            self.inputs = [_port(device, desc, "input", i) for i in range(mdl.get_num_inputs(desc))]
            self.outputs = [
                _port(device, desc, "output", i) for i in range(mdl.get_num_outputs(desc))
            ]
            self.gears = _gears(device, desc)
        finally:
            mdl.destroy_desc(desc)

    def set_dims(self, inputs: int, index: int, dims: dict[str, Any]) -> None:
        """Choose the gear: without it the largest one runs. index: of the shape input."""
        code = self._device.acl.mdl.set_input_dynamic_dims(self._id, inputs, index, dims)
        if code != 0:
            self._device.check(code, "mdl.set_input_dynamic_dims")

    def execute_later(self, inputs: int, outputs: int) -> None:
        """When the stream comes to it."""
        device = self._device
        code = device.acl.mdl.execute_async(self._id, inputs, outputs, device.stream)
        if code != 0:
            device.check(code, "mdl.execute_async")

    def unload(self) -> None:
        self._device.attach()
        self._device.check(self._device.acl.mdl.unload(self._id), "mdl.unload")


class Dataset:
    """Buffers of one side of a call, over memory that others own."""

    def __init__(self, device: Device, buffers: Sequence[tuple[int, int]]) -> None:
        """buffers: (address, size) in the model's order."""
        self._acl = device.acl
        self.handle: int = self._acl.mdl.create_dataset()
        self._buffers = []
        for address, size_bytes in buffers:
            buffer = self._acl.create_data_buffer(address, size_bytes)
            self._buffers.append(buffer)
            made = self._acl.mdl.add_dataset_buffer(self.handle, buffer)
            device.value(made, "mdl.add_dataset_buffer", size_bytes)

    def close(self) -> None:
        for buffer in self._buffers:
            self._acl.destroy_data_buffer(buffer)
        self._acl.mdl.destroy_dataset(self.handle)


def view(address: int, size_bytes: int) -> Bytes:
    """Memory of this process as an array: of a shared-memory board, or pinned."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _port(device: Device, desc: int, side: str, index: int) -> Port:
    mdl = device.acl.mdl
    if side == "input":
        dims = device.value(mdl.get_input_dims(desc, index), "mdl.get_input_dims")
        kind = mdl.get_input_data_type(desc, index)
        size_bytes = mdl.get_input_size_by_index(desc, index)
        name = getattr(mdl, "get_input_name_by_index", None)  # some 8.0 builds lack it
    else:
        dims = device.value(mdl.get_output_dims(desc, index), "mdl.get_output_dims")
        kind = mdl.get_output_data_type(desc, index)
        size_bytes = mdl.get_output_size_by_index(desc, index)
        name = getattr(mdl, "get_output_name_by_index", None)
    called = name(desc, index) if name else dims["name"]
    return Port(called, codes.DTYPES.get(kind, f"type {kind}"), tuple(dims["dims"]), size_bytes)


def _gears(device: Device, desc: int) -> list[tuple[int, ...]]:
    """Of each gear: all dims of all inputs, in order. Empty for a static model."""
    mdl = device.acl.mdl
    count = device.value(
        mdl.get_input_dynamic_gear_count(desc, codes.ALL_GEARS), "mdl.get_input_dynamic_gear_count"
    )
    if count == 0:
        return []
    found = mdl.get_input_dynamic_dims(desc, codes.ALL_GEARS, count)
    return [tuple(g["dims"]) for g in device.value(found, "mdl.get_input_dynamic_dims")]
