"""Numbers of the Ascend library: it exports none. And what each failure means for the worker.

From the public headers of CANN 8.1. Three classes: out of memory (a smaller launch may do), fatal
(only a new process helps), and ours to fix (the call was wrong).
"""

from __future__ import annotations

from edged.errors import EdgedError
from edged.worker.executor import DeviceFault

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
MEM_HBM = 1  # on a chip without HBM this means its DDR
RUN_MODE_DEVICE = 0  # the CPU shares the device's memory; 1 = a card with memory of its own
DYNAMIC_TENSOR_NAME = "ascend_mbatch_shape_data"
ALL_GEARS = -1  # index of the gear getters
MAX_DIMS = 128

INVALID_PARAM = 100000
REPEAT_INITIALIZE = 100002
GE_MODEL_ADDR_INVALID = 145007
MEMORY_ALLOCATION = 207001

DTYPES = {0: "float32", 1: "float16", 2: "int8", 3: "int32", 9: "int64"}

NAMES = {
    100000: "INVALID_PARAM",
    100001: "UNINITIALIZE",
    100002: "REPEAT_INITIALIZE",
    100003: "INVALID_FILE",
    100037: "REPEAT_FINALIZE",
    100039: "COMPILING_STUB_MODE",
    107000: "RT_PARAM_INVALID",
    107001: "RT_INVALID_DEVICEID",
    107002: "RT_CONTEXT_NULL",
    107003: "RT_STREAM_CONTEXT",
    107004: "RT_MODEL_CONTEXT",
    107017: "RT_INVALID_HANDLE",
    145000: "GE_PARAM_INVALID",
    145001: "GE_EXEC_NOT_INIT",
    145002: "GE_EXEC_MODEL_PATH_INVALID",
    145003: "GE_EXEC_MODEL_ID_INVALID",
    145006: "GE_EXEC_MODEL_DATA_SIZE_INVALID",
    145007: "GE_EXEC_MODEL_ADDR_INVALID",
    145011: "GE_DYNAMIC_INPUT_ADDR_INVALID",
    145012: "GE_DYNAMIC_INPUT_LENGTH_INVALID",
    145013: "GE_DYNAMIC_BATCH_SIZE_INVALID",
    148049: "INVALID_OPP_PATH",
    200000: "BAD_ALLOC",
    200001: "API_NOT_SUPPORT",
    207000: "RT_FEATURE_NOT_SUPPORT",
    207001: "RT_MEMORY_ALLOCATION",
    207004: "RT_NO_DEVICE",
    207005: "RT_RESOURCE_ALLOC_FAIL",
    207006: "RT_NO_PERMISSION",
    207008: "RT_NO_STREAM_RESOURCE",
    207018: "RT_DEVICE_OOM",
    245000: "GE_MEMORY_ALLOCATION",
    300000: "STORAGE_OVER_LIMIT",
    500000: "INTERNAL_ERROR",
    507000: "RT_INTERNAL_ERROR",
    507001: "RT_TS_ERROR",
    507008: "RT_SOC_VERSION",
    507010: "RT_LOST_HEARTBEAT",
    507011: "RT_MODEL_EXECUTE",
    507014: "RT_AICORE_TIMEOUT",
    507015: "RT_AICORE_EXCEPTION",
    507016: "RT_AICORE_TRAP_EXCEPTION",
    507017: "RT_AICPU_TIMEOUT",
    507018: "RT_AICPU_EXCEPTION",
    507046: "RT_STREAM_SYNC_TIMEOUT",
    507053: "RT_DEVICE_MEM_ERROR",
    507899: "RT_DRV_INTERNAL_ERROR",
    507901: "RT_SOCKET_CLOSE",
    545000: "GE_INTERNAL_ERROR",
    545001: "GE_LOAD_MODEL",
    545601: "GE_MODEL_EXECUTE_TIMEOUT",
}
_OUT_OF_MEMORY = {200000, 207001, 207005, 207008, 207018, 245000, 300000}
_OURS = {507008, 148049, 545001}
# What goes with some codes on a board and is not in the library's own text.
_HINTS = {
    100039: "a stub library is on LD_LIBRARY_PATH; source the set_env.sh of the runtime",
    107001: "no such device; see `npu-smi info -l`",
    207006: "the user must be in the group HwHiAiUser and see /dev/davinci*",
    507008: "the .om was built for another chip; export with the right --soc",
}


class DeviceError(EdgedError):
    """A call of the library failed. size_bytes: what it was about, where it was about a size."""

    def __init__(self, call: str, ret: int, detail: str, size_bytes: int = 0) -> None:
        self.call, self.ret, self.detail, self.size_bytes = call, ret, detail, size_bytes
        self.name = NAMES.get(ret, "unknown code")
        about = f" of {size_bytes} bytes" if size_bytes else ""
        hint = f"; {_HINTS[ret]}" if ret in _HINTS else ""
        text = f": {detail}" if detail else ""
        super().__init__(f"{call}{about} failed with {ret} {self.name}{text}{hint}")


class OutOfDeviceMemory(DeviceError, MemoryError):
    """The device has not enough memory (or streams) left."""


class FatalDeviceError(DeviceError, DeviceFault):
    """The device or driver is in a state only a new process may leave."""


class CallerError(DeviceError):
    """The call, the model or the installation is wrong; trying again gives the same."""


def failure(call: str, ret: int, detail: str, size_bytes: int = 0) -> DeviceError:
    """The exception for a ret: 2xxxxx resources partly, 5xxxxx the device, 1xxxxx the caller."""
    kind: type[DeviceError]
    if ret in _OUT_OF_MEMORY:
        kind = OutOfDeviceMemory
    elif ret >= 500000 and ret not in _OURS:
        kind = FatalDeviceError
    else:
        kind = CallerError
    return kind(call, ret, detail, size_bytes)
