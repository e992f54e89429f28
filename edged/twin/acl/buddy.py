"""Buddy: which physical pages of a device are taken, in blocks of powers of two. Pure.

Knows no addresses of a process: memory.py maps what is taken here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
HUGE_ORDER = 9  # a huge page is 2**9 pages

Block = tuple[int, int]  # (first page, order)


class OutOfPages(Exception):
    """Not enough free pages of the kind asked for; nothing was taken."""


@dataclass(frozen=True)
class Policy:
    """May a request use huge pages, must it, or neither."""

    huge: bool
    normal: bool


class Buddy:
    """Free blocks by order. `total_bytes` is rounded down to whole blocks of the top order."""

    def __init__(self, total_bytes: int, top_order: int = HUGE_ORDER) -> None:
        self._top = top_order
        blocks = total_bytes // (PAGE_BYTES << top_order)
        self.total_bytes = blocks * (PAGE_BYTES << top_order)
        self._free: list[set[int]] = [set() for _ in range(top_order + 1)]
        self._free[top_order] = {n << top_order for n in range(blocks)}
        self.free_pages = blocks << top_order

    @property
    def free_bytes(self) -> int:
        return self.free_pages * PAGE_BYTES

    @property
    def free_huge_bytes(self) -> int:
        """In whole huge pages; less than free_bytes when small requests have split some."""
        huge = sum(
            len(self._free[o]) << o for o in range(min(HUGE_ORDER, self._top), self._top + 1)
        )
        return huge * PAGE_BYTES

    def take(self, size_bytes: int, policy: Policy) -> list[Block]:
        """Pages for `size_bytes`, not contiguous between blocks. Raises OutOfPages.

        Requests of at most 1 MiB use normal pages unless only huge ones are allowed.
        """
        wants_huge = policy.huge and (size_bytes > 1 << 20 or not policy.normal)
        if wants_huge:
            pages = -(-size_bytes // HUGE_PAGE_BYTES) << HUGE_ORDER
            if pages * PAGE_BYTES <= self.free_huge_bytes:
                return self._take_blocks(pages, HUGE_ORDER)
            if not policy.normal:
                raise OutOfPages
        pages = -(-size_bytes // PAGE_BYTES)
        if pages > self.free_pages:
            raise OutOfPages
        return self._take_blocks(pages, 0)

    def give(self, blocks: Sequence[Block]) -> None:
        """Return blocks taken before; free neighbours merge."""
        for first, order in blocks:
            self.free_pages += 1 << order
            while order < self._top:
                buddy = first ^ (1 << order)
                if buddy not in self._free[order]:
                    break
                self._free[order].remove(buddy)
                first, order = min(first, buddy), order + 1
            self._free[order].add(first)

    def _take_blocks(self, pages: int, least_order: int) -> list[Block]:
        """Smallest fitting blocks first, so that small requests do not break up huge pages."""
        taken = []
        while pages > 0:
            order = min(self._top, max(least_order, pages.bit_length() - 1))
            while not any(self._free[order:]):
                order -= 1  # enough pages are free, but in smaller blocks
            taken.append((self._split(order), order))
            pages -= 1 << order
        return taken

    def _split(self, order: int) -> int:
        """Take a block of exactly this order from the smallest free one that holds it."""
        found = next(o for o in range(order, self._top + 1) if self._free[o])
        first = self._free[found].pop()
        for lower in range(found - 1, order - 1, -1):
            self._free[lower].add(first + (1 << lower))
        self.free_pages -= 1 << order
        return first
