"""`acl.util.*`: pointers of Python objects and native threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from edged.twin.acl import codes
from edged.twin.acl.call import NOTHING, Surface, action, bare, producer
from edged.twin.acl.codes import Failure
from edged.twin.acl.process import Process

# NumPy's C enumeration.
_NUMPY_TYPES: dict[int, str] = {
    0: "bool",
    1: "int8",
    2: "uint8",
    3: "int16",
    4: "uint16",
    5: "int32",
    6: "uint32",
    7: "int64",
    8: "uint64",
    9: "int64",
    10: "uint64",
    11: "float32",
    12: "float64",
    23: "float16",
}


class Native(threading.Thread):
    """A thread whose exception is handed to whoever joins it."""

    def __init__(self, function: Callable[[Any], Any], argument: Any) -> None:
        super().__init__(daemon=True)
        self._function, self._argument = function, argument
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._function(self._argument)
        except Exception as error:  # noqa: BLE001 - raised again by stop_thread
            self.failure = error


class Util(Surface):
    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._threads: dict[int, Native] = {}

    @bare("O", 0)
    def numpy_to_ptr(self, array: np.ndarray[Any, Any]) -> int:
        if not isinstance(array, np.ndarray):
            raise TypeError("argument must be a numpy array")
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        return int(array.ctypes.data)

    @bare("O", 0)
    def bytes_to_ptr(self, data: bytes) -> int:
        """Valid while `data` lives."""
        if type(data) is not bytes:
            raise ValueError(f"argument must be bytes, not {type(data).__name__}")
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0

    @bare("kk", b"")
    def ptr_to_bytes(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    @bare("kOi", None)
    def ptr_to_numpy(self, address: int, shape: tuple[int, ...], kind: int) -> Any:
        """A writeable view without a copy; touching it crashes where the address is not ours."""
        if kind not in _NUMPY_TYPES:
            raise ValueError(f"numpy type {kind} is not supported")
        dtype = np.dtype(_NUMPY_TYPES[kind])
        count = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_uint8 * count).from_address(address)
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)

    @producer("OO", 0, needs=NOTHING)
    def start_thread(self, function: Callable[[Any], Any], arguments: list[Any]) -> int:
        """The function gets one argument, the list."""
        thread = Native(function, arguments)
        thread.start()
        identity = thread.ident or 0  # subscribe_report names threads by it
        self._threads[identity] = thread
        return identity

    @action("k", NOTHING)
    def stop_thread(self, thread: int) -> None:
        """Joins. Raises RuntimeError with what the thread's function raised."""
        found = self._threads.pop(thread, None)
        if found is None:
            raise Failure(codes.INVALID_PARAM, f"{thread} is no thread of start_thread")
        found.join()
        if found.failure is not None:
            raise RuntimeError(str(found.failure)) from found.failure
