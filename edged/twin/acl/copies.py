"""`acl.rt.*`: memory and copies. Directions follow from the addresses; the kind is checked only
where the library does."""

from __future__ import annotations

import ctypes

from edged.twin.acl import codes
from edged.twin.acl.call import Surface, action, producer
from edged.twin.acl.codes import Failure

_MALLOC_PAD_BYTES = 32
_ATTRIBUTES = range(12)
_HUGE_ATTRIBUTES = (2, 4, 6, 8, 10, 11)


class MemoryCalls(Surface):
    @producer("ki", 0)
    def malloc(self, size_bytes: int, policy: int) -> int:
        padded = _up(size_bytes, 32) + _MALLOC_PAD_BYTES
        return self._process.allocate(_sized(size_bytes), padded, policy)

    @producer("ki", 0)
    def malloc_align32(self, size_bytes: int, policy: int) -> int:
        return self._process.allocate(_sized(size_bytes), _up(size_bytes, 32), policy)

    @producer("ki", 0)
    def malloc_cached(self, size_bytes: int, policy: int) -> int:
        return self._process.allocate(_sized(size_bytes), _up(size_bytes, 32), policy)

    @action("kk")
    def mem_flush(self, address: int, size_bytes: int) -> None:
        self._process.locate(address, size_bytes)

    @action("kk")
    def mem_invalidate(self, address: int, size_bytes: int) -> None:
        self._process.locate(address, size_bytes)

    @action("k")
    def free(self, address: int) -> None:
        """At once, without waiting for work in flight."""
        if address == 0:
            raise Failure(codes.RT_PARAM_INVALID, "free of a null pointer")
        self._process.release(address)

    @producer("k", 0)
    def malloc_host(self, size_bytes: int) -> int:
        """On a shared-memory board this is device memory too, in normal pages."""
        process = self._process
        if process.run_mode == codes.RC:
            return process.allocate(_sized(size_bytes), size_bytes, codes.NORMAL_ONLY)
        return process.pin(_sized(size_bytes))

    @action("k")
    def free_host(self, address: int) -> None:
        process = self._process
        if process.run_mode == codes.RC:
            process.release(address)
        else:
            process.unpin(address)

    @action("kkkki")
    def memcpy(self, to: int, room: int, source: int, count: int, kind: int) -> None:
        _checked(room, count, kind)
        process = self._process
        ctypes.memmove(process.locate(to, count), process.locate(source, count), count)

    @action("kkkkik")
    def memcpy_async(
        self, to: int, room: int, source: int, count: int, kind: int, stream: int
    ) -> None:
        _checked(room, count, kind)
        process = self._process
        if kind == codes.H2H and process.run_mode == codes.EP:
            raise Failure(codes.FEATURE_NOT_SUPPORT, "host to host is not asynchronous on a card")
        process.locate(to, count)
        process.locate(source, count)

        def copy() -> None:
            ctypes.memmove(process.locate(to, count), process.locate(source, count), count)

        process.stream(stream).submit(process.task(copy))

    @action("kkik")
    def memset(self, address: int, room: int, value: int, count: int) -> None:
        _checked(room, count, codes.KIND_DEFAULT)
        ctypes.memset(self._process.locate(address, count), value, count)

    @action("kkikk")
    def memset_async(self, address: int, room: int, value: int, count: int, stream: int) -> None:
        _checked(room, count, codes.KIND_DEFAULT)
        process = self._process
        process.locate(address, count)

        def fill() -> None:
            ctypes.memset(process.locate(address, count), value, count)

        process.stream(stream).submit(process.task(fill))

    @producer("i", 0, 0)
    def get_mem_info(self, attribute: int) -> tuple[int, int]:
        """(free, total) bytes."""
        if attribute not in _ATTRIBUTES:
            raise Failure(codes.RT_PARAM_INVALID, f"memory attribute {attribute} is unknown")
        memory = self._process.memory
        huge = attribute in _HUGE_ATTRIBUTES
        return (memory.free_huge_bytes if huge else memory.free_bytes), memory.total_bytes

    # --- documented as unsupported on 310B and 310P ----------------------------------------------

    @producer("kki", 0)
    def host_register(self, address: int, size_bytes: int, kind: int) -> int:
        raise Failure(codes.FEATURE_NOT_SUPPORT, "host_register is not supported on this chip")

    @action("k")
    def host_unregister(self, address: int) -> None:
        raise Failure(codes.FEATURE_NOT_SUPPORT, "host_register is not supported on this chip")

    @producer("kkkk", 0)
    def reserve_mem_address(self, size: int, alignment: int, wanted: int, flags: int) -> int:
        raise Failure(codes.FEATURE_NOT_SUPPORT, "the twin has no virtual memory management")


def _sized(size_bytes: int) -> int:
    if size_bytes == 0:
        raise Failure(codes.INVALID_PARAM, "size is 0")
    return size_bytes


def _checked(room: int, count: int, kind: int) -> None:
    if count == 0 or count > room:
        raise Failure(codes.RT_PARAM_INVALID, f"{count} bytes do not fit into {room}")
    if not codes.H2H <= kind <= 7:
        raise Failure(codes.RT_PARAM_INVALID, f"copy kind {kind} is unknown")


def _up(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment
