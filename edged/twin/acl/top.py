"""`acl.*`: initialisation, data buffers and small helpers."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from edged.twin.acl import codes
from edged.twin.acl.call import INITIALISED, NOTHING, Surface, action, bare, producer
from edged.twin.acl.codes import Failure

_ITEM_BYTES = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1, 27: 2}


@dataclass(eq=False)
class DataBuffer:
    """A pointer and a size; owns nothing."""

    address: int
    size_bytes: int


@dataclass(eq=False)
class TensorDesc:
    dtype: int
    dims: list[int]
    format: int


class Top(Surface):
    without_init = codes.UNINITIALIZE

    @action("|s", NOTHING)
    def init(self, config_path: str = "") -> None:
        process = self._process
        if process.initialised or process.finalised:
            raise Failure(codes.REPEAT_INITIALIZE, "acl.init is called once per process")
        process.start()

    @action("", NOTHING)
    def finalize(self) -> None:
        process = self._process
        if not process.initialised:
            code = codes.REPEAT_FINALIZE if process.finalised else codes.UNINITIALIZE
            raise Failure(code, "nothing to finalize")
        if process.device_uses:
            process.device_uses = 0
            process.close_device()
        process.initialised, process.finalised = False, True
        process.state.close()

    @bare("", None)
    def get_soc_name(self) -> str | None:
        return self._process.state.board.soc if self._process.initialised else None

    @producer("", 0, 0, 0, needs=NOTHING)
    def get_version(self) -> tuple[int, int, int]:
        return 1, 0, 0

    @bare("", None)
    def get_recent_err_msg(self) -> str | None:
        return self._process.take_message()

    @bare("kk", 0)
    def create_data_buffer(self, address: int, size_bytes: int) -> int:
        return self._process.handles.add(DataBuffer(address, size_bytes))

    @action("k", NOTHING)
    def destroy_data_buffer(self, buffer: int) -> None:
        self._process.handles.remove(buffer, DataBuffer, codes.INVALID_PARAM)

    @bare("k", 0)
    def get_data_buffer_addr(self, buffer: int) -> int:
        return self._buffer(buffer).address

    @bare("k", 0)
    def get_data_buffer_size(self, buffer: int) -> int:
        return self._buffer(buffer).size_bytes & 0xFFFF_FFFF  # 32 bits in the old call

    @bare("k", 0)
    def get_data_buffer_size_v2(self, buffer: int) -> int:
        return self._buffer(buffer).size_bytes

    @action("kkk", NOTHING)
    def update_data_buffer(self, buffer: int, address: int, size_bytes: int) -> None:
        found = self._buffer(buffer)
        found.address, found.size_bytes = address, size_bytes
        self._process.handles.version += 1

    @bare("iOi", 0)
    def create_tensor_desc(self, dtype: int, dims: list[int], layout: int) -> int:
        return self._process.handles.add(TensorDesc(dtype, list(dims), layout))

    @bare("k", None)
    def destroy_tensor_desc(self, desc: int) -> None:
        self._process.handles.remove(desc, TensorDesc)

    @bare("i", 0)
    def data_type_size(self, dtype: int) -> int:
        return _ITEM_BYTES.get(dtype, 0)

    @bare("f", 0)
    def float_to_float16(self, value: float) -> int:
        try:
            return int(struct.unpack("<H", struct.pack("<e", value))[0])
        except OverflowError:
            return 0x7C00 if value > 0 else 0xFC00

    @bare("i", 0.0)
    def float16_to_float(self, bits: int) -> float:
        return float(struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0])

    @bare("is", None, needs=INITIALISED)
    def app_log(self, level: int, text: str) -> None:
        """Goes to the library's own log file, which the twin does not keep."""

    def _buffer(self, handle: int) -> DataBuffer:
        return self._process.handles.get(handle, DataBuffer, codes.INVALID_PARAM)
