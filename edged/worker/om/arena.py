"""The arena: one device allocation, cut into pieces once. Nothing is allocated after it.

Starts are multiples of 128 (every CANN version is content), sizes ALIGN_UP(n, 32) + 32 (the
device may touch what is behind a buffer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edged.worker.om.binding import Bytes, Device, view

START_BYTES = 128
_PAD_BYTES = 32


def piece_bytes(size_bytes: int) -> int:
    """What a buffer of this size occupies, the distance to the next start included."""
    padded = _up(size_bytes, _PAD_BYTES) + _PAD_BYTES
    return _up(padded, START_BYTES)


@dataclass(frozen=True)
class Piece:
    """Usable bytes of a buffer; offset from the arena's aligned base."""

    offset: int
    size_bytes: int


def layout(sizes: Mapping[str, int]) -> tuple[dict[str, Piece], int]:
    """Where each named buffer goes, and the bytes to allocate for all of them."""
    pieces: dict[str, Piece] = {}
    offset = 0
    for name, size_bytes in sizes.items():
        pieces[name] = Piece(offset, size_bytes)
        offset += piece_bytes(size_bytes)
    return pieces, offset + START_BYTES  # malloc promises a multiple of 64 only


class Arena:
    """Named buffers on the device. sizes: bytes by name."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self._pieces, self.total_bytes = layout(sizes)
        self._allocation = device.malloc(self.total_bytes)
        self._base = _up(self._allocation, START_BYTES)

    @property
    def used_bytes(self) -> int:
        """Of what was asked for; the rest of total_bytes is alignment and padding."""
        return sum(piece.size_bytes for piece in self._pieces.values())

    def address(self, name: str) -> int:
        return self._base + self._pieces[name].offset

    def size_bytes(self, name: str) -> int:
        return self._pieces[name].size_bytes

    def view(self, name: str) -> Bytes:
        """The buffer's bytes, where the CPU shares the device's memory."""
        return view(self.address(name), self.size_bytes(name))

    def fill(self, name: str, value: int) -> None:
        self._device.fill(self.address(name), value, self.size_bytes(name))

    def close(self) -> None:
        self._device.free(self._allocation)


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
