"""Device memory: allocations, their addresses and their bytes, and who may look at them.

On a shared-memory board (RC) a device address is an address of this process; on a card (EP) it
is only a name, and the bytes lie elsewhere. Freed memory is closed, never recycled silently.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from edged.twin.acl import codes
from edged.twin.acl.buddy import HUGE_PAGE_BYTES, PAGE_BYTES, Block, Buddy, OutOfPages, Policy
from edged.twin.acl.codes import Failure
from edged.twin.acl.pages import Ranges, Reservation

# Starts are promised to be multiples of 64, so they are never multiples of more.
START_OFFSET_BYTES = 64
_QUARANTINED = 256  # freed ranges not used again for a while, so that stale pointers are noticed
_POLICIES = {
    codes.HUGE_FIRST: Policy(huge=True, normal=True),
    codes.HUGE_ONLY: Policy(huge=True, normal=False),
    codes.NORMAL_ONLY: Policy(huge=False, normal=True),
}


@dataclass
class Allocation:
    """size_bytes: as asked for; blocks: the physical pages; mapped: (start, bytes) in pages."""

    address: int
    size_bytes: int
    mapped: tuple[int, int]
    blocks: list[Block]
    used_s: float
    readable: bool = True  # False: the library's own (weights), no business of the caller's
    reclaimed: bool = False


class DeviceMemory:
    """All allocations of this process on one device. version changes with every one of them."""

    def __init__(self, total_bytes: int, visible: bool) -> None:
        self._pages = Buddy(total_bytes)
        span = 2 * self._pages.total_bytes + (64 << 20)  # room against holes
        self._device = Reservation(span)
        self._bytes = self._device if visible else Reservation(span)
        self._shift = self._bytes.base - self._device.base
        self._ranges = Ranges(self._device.base, span)
        self._quarantine: deque[tuple[int, int]] = deque()
        self._limbo: list[Allocation] = []
        self._live: dict[int, Allocation] = {}
        self._starts: list[int] = []
        self.version = 0

    @property
    def total_bytes(self) -> int:
        return self._pages.total_bytes

    @property
    def free_bytes(self) -> int:
        return self._pages.free_bytes

    @property
    def free_huge_bytes(self) -> int:
        return self._pages.free_huge_bytes

    @property
    def count(self) -> int:
        return len(self._live)

    def take(
        self, size_bytes: int, padded_bytes: int, policy: int, now_s: float, readable: bool = True
    ) -> int:
        """The address of new memory. Raises Failure: no pages, or an unknown policy."""
        kind = codes.P2P_POLICIES.get(policy & 0xFF, policy & 0xFF)
        if kind not in _POLICIES:
            raise Failure(codes.RT_PARAM_INVALID, f"memory policy {policy} is unknown")
        needed = padded_bytes + START_OFFSET_BYTES
        try:
            blocks = self._pages.take(needed, _POLICIES[kind])
        except OutOfPages:
            raise Failure(
                codes.MEMORY_ALLOCATION,
                f"{size_bytes} bytes asked for, {self.free_bytes} free "
                f"({self.free_huge_bytes} in huge pages)",
            ) from None
        page = HUGE_PAGE_BYTES if needed > HUGE_PAGE_BYTES else PAGE_BYTES
        span = -(-needed // page) * page
        start = self._ranges.take(span, page)
        while start is None and self._quarantine:
            self._ranges.give(*self._quarantine.popleft())
            start = self._ranges.take(span, page)
        if start is None:
            self._pages.give(blocks)
            raise Failure(codes.MEMORY_ALLOCATION, f"no address range of {span} bytes is left")
        self._bytes.open(start + self._shift, span, filled=readable)
        address = start + START_OFFSET_BYTES
        made = Allocation(address, size_bytes, (start, span), blocks, now_s, readable)
        self._live[address] = made
        self._index()
        return address

    def give(self, address: int, executing: bool = False) -> None:
        """Free at once. Raises Failure for anything that is not the start of an allocation.

        executing: the device may be at work in it, so its pages stay open until `settle`.
        """
        found = self._live.pop(address, None)
        if found is None:
            raise Failure(
                codes.RT_PARAM_INVALID, f"free of {address:#x}, which is not allocated (any more)"
            )
        if executing:
            self._limbo.append(found)
        else:
            self._close(found)
        self._quarantine.append(found.mapped)
        if len(self._quarantine) > _QUARANTINED:
            self._ranges.give(*self._quarantine.popleft())
        self._index()

    def settle(self) -> None:
        """Nothing executes: close what was freed meanwhile."""
        for allocation in self._limbo:
            self._close(allocation)
        self._limbo.clear()

    def owns(self, address: int) -> bool:
        """Is this an address of the device, live or not."""
        return 0 <= address - self._device.base < self._device.size_bytes

    def locate(self, address: int, count: int, now_s: float) -> int:
        """Where the bytes lie in this process. Raises Failure unless all of them are live."""
        i = bisect_right(self._starts, address) - 1
        found = self._live[self._starts[i]] if i >= 0 else None
        if found is None or address >= found.mapped[0] + found.mapped[1]:
            raise Failure(codes.RT_PARAM_INVALID, f"{address:#x} is not allocated (any more)")
        if found.reclaimed:
            raise Failure(codes.DEVICE_MEM_ERROR, f"{address:#x} was reclaimed by the device")
        if not found.readable or address + count > found.address + found.size_bytes:
            raise Failure(
                codes.RT_PARAM_INVALID,
                f"{count} bytes at {address:#x} reach beyond the {found.size_bytes} bytes "
                f"at {found.address:#x}",
            )
        found.used_s = now_s
        return address + self._shift

    def reclaim(self, unused_since_s: float) -> int:
        """The injected fault: take away what nobody used since then; how many allocations."""
        stale = [
            a
            for a in self._live.values()
            if a.readable and not a.reclaimed and a.used_s < unused_since_s
        ]
        for allocation in stale:
            self._close(allocation)
            allocation.reclaimed = True
        self.version += len(stale)
        return len(stale)

    def touch(self, addresses: Sequence[int], now_s: float) -> None:
        """The device used them. Raises Failure where one is gone."""
        for address in addresses:
            self.locate(address, 1, now_s)

    def close(self) -> None:
        """Everything goes, as when the process ends."""
        self._device.release()
        if self._bytes is not self._device:
            self._bytes.release()

    def _close(self, allocation: Allocation) -> None:
        if not allocation.reclaimed:
            start, span = allocation.mapped
            self._bytes.close(start + self._shift, span)
            self._pages.give(allocation.blocks)

    def _index(self) -> None:
        self._starts = sorted(self._live)
        self.version += 1
