"""Address space for device memory: one reservation nobody may touch until a part is opened.

A pointer into a closed part crashes the process, as it does on a board. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_PROT_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_FLAGS = mmap.MAP_PRIVATE | _MAP_NORESERVE
_HUGE_PAGE_BYTES = 2 << 20
_FILL_BYTES = 1 << 30  # more is not written at once: it would take that much of the host's memory

# Memory is never handed out clean: read as fp16, fp32 or an integer this is absurd, not zero.
PATTERN = 0xCB


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


class Reservation:
    """`size_bytes` of addresses from `base` (a multiple of 2 MiB) on, closed at first."""

    def __init__(self, size_bytes: int) -> None:
        self._libc = _libc()
        self._pattern: int | None = None
        self._mapped_bytes = size_bytes + _HUGE_PAGE_BYTES
        self._start = self._map(0, self._mapped_bytes, _PROT_NONE, 0)
        self.size_bytes = size_bytes
        self.base = -(-self._start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES

    def open(self, address: int, size_bytes: int, filled: bool) -> None:
        """Make a range usable; filled with PATTERN, or zero where nobody is meant to look."""
        if filled and size_bytes > _FILL_BYTES:
            self._map_pattern(address, size_bytes)
            return
        self._map(address, size_bytes, _READ_WRITE, _MAP_FIXED)
        if size_bytes >= _HUGE_PAGE_BYTES:
            self._libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
        if filled:
            ctypes.memset(address, PATTERN, size_bytes)

    def close(self, address: int, size_bytes: int) -> None:
        """Give the pages of a range back; touching it crashes from now on."""
        self._map(address, size_bytes, _PROT_NONE, _MAP_FIXED)

    def release(self) -> None:
        self._libc.munmap(self._start, self._mapped_bytes)
        if self._pattern is not None:
            os.close(self._pattern)

    def _map_pattern(self, address: int, size_bytes: int) -> None:
        """The same filled pages over and over, copied only when written: costs no memory yet."""
        if self._pattern is None:
            self._pattern = os.memfd_create("pattern")
            os.write(self._pattern, bytes([PATTERN]) * _HUGE_PAGE_BYTES)
        for start in range(address, address + size_bytes, _HUGE_PAGE_BYTES):
            size = min(_HUGE_PAGE_BYTES, address + size_bytes - start)
            self._map(start, size, _READ_WRITE, _MAP_FIXED, self._pattern)

    def _map(
        self, address: int, size_bytes: int, protection: int, flags: int, file: int = -1
    ) -> int:
        flags |= _FLAGS if file >= 0 else _FLAGS | mmap.MAP_ANONYMOUS
        got = self._libc.mmap(address, size_bytes, protection, flags, file, 0)
        if got is None or got == ctypes.c_void_p(-1).value:
            raise MemoryError(f"cannot map {size_bytes} bytes for the simulated device")
        return int(got)


class Ranges:
    """First fit over a range of addresses. Pure; starts are multiples of the alignment."""

    def __init__(self, base: int, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(base, base + size_bytes)]

    def take(self, size_bytes: int, alignment: int) -> int | None:
        """The start of a free range, now taken; None when there is none."""
        for i, (start, end) in enumerate(self._free):
            aligned = -(-start // alignment) * alignment
            if aligned + size_bytes <= end:
                rest = [(start, aligned), (aligned + size_bytes, end)]
                self._free[i : i + 1] = [(low, high) for low, high in rest if low < high]
                return aligned
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Return a range taken before."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (start, start + size_bytes)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged
