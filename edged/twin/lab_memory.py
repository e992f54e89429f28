"""Where a simulated stream's KV memory comes from: an arena of slots, or the device each time.

`direct` is what the published field report did and 42 % of its requests failed of: a buddy
allocator gives a power of two, so 147 MiB take a 256 MiB block.
"""

from __future__ import annotations

from edged.errors import EngineFault


class Arena:
    """Slots carved from one block at start: taking one cannot fail."""

    def __init__(self, slots: int) -> None:
        self._free = slots

    def free_streams(self) -> int:
        return self._free

    def take(self) -> None:
        if self._free < 1:
            raise EngineFault("no free slot")
        self._free -= 1

    def give(self, taken: object) -> None:
        self._free += 1


class Direct:
    """A buddy system over what is free after the model is loaded."""

    def __init__(self, free_bytes: int, stream_bytes: int, least_bytes: int = 1 << 20) -> None:
        self._block = 1 << (max(stream_bytes, least_bytes) - 1).bit_length()
        self._free: dict[int, int] = {}  # block size -> how many are free
        size = 1 << free_bytes.bit_length()
        while size >= least_bytes:
            if free_bytes >= size:
                self._free[size] = 1
                free_bytes -= size
            size >>= 1

    def free_streams(self) -> int:
        return sum(count * (size // self._block) for size, count in self._free.items())

    def take(self) -> int:
        """Returns the size taken. The smallest block that fits is split down to it."""
        fitting = [s for s, count in self._free.items() if s >= self._block and count]
        if not fitting:
            raise EngineFault(f"out of device memory: no free block of {self._block >> 20} MiB")
        size = min(fitting)
        self._free[size] -= 1
        while size > self._block:
            size >>= 1
            self._free[size] = self._free.get(size, 0) + 1
        return self._block

    def give(self, taken: object) -> None:
        """Freed blocks of equal size serve equal requests, so merging is not needed here."""
        self._free[self._block] = self._free.get(self._block, 0) + 1
