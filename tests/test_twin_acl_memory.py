"""The simulated device's memory: pages, address ranges and the bytes behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.twin.acl import codes
from edged.twin.acl.buddy import HUGE_PAGE_BYTES, PAGE_BYTES, Buddy, OutOfPages, Policy
from edged.twin.acl.codes import Failure
from edged.twin.acl.memory import DeviceMemory
from edged.twin.acl.pages import Ranges

POLICIES = [Policy(True, True), Policy(True, False), Policy(False, True)]
MIB = 1 << 20

steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 6 * MIB), st.sampled_from(POLICIES)),
        st.tuples(st.just("give"), st.integers(0, 50), st.just(None)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_pages_are_never_lost_or_given_twice(actions: list) -> None:
    """Any order of takes and gives: no page belongs to two requests, the count always adds up,
    and giving everything back makes whole huge pages again."""
    buddy = Buddy(8 * MIB)
    held: list[list[tuple[int, int]]] = []
    for action, number, policy in actions:
        if action == "give":
            if held:
                buddy.give(held.pop(number % len(held)))
            continue
        try:
            held.append(buddy.take(number, policy))
        except OutOfPages:
            wanted = -(-number // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            assert number > buddy.free_bytes or (
                not policy.normal and wanted > buddy.free_huge_bytes
            )
    pages = [first + i for blocks in held for first, order in blocks for i in range(1 << order)]
    assert len(pages) == len(set(pages))
    assert buddy.free_pages + len(pages) == 8 * MIB // PAGE_BYTES
    for blocks in held:
        buddy.give(blocks)
    assert buddy.free_huge_bytes == buddy.free_bytes == buddy.total_bytes


def test_small_requests_leave_huge_pages_whole() -> None:
    """256 small requests fit into one huge page instead of splitting many."""
    buddy = Buddy(8 * MIB)
    for _ in range(512):
        buddy.take(100, Policy(True, True))
    assert buddy.free_huge_bytes == 6 * MIB


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.sampled_from([1, 4, 16]))))
def test_address_ranges_never_overlap(actions: list[tuple[bool, int, int]]) -> None:
    """Any order of takes and gives of ranges: aligned, disjoint, and all of it comes back."""
    ranges = Ranges(0, 256)
    held: list[tuple[int, int]] = []
    for take, size, alignment in actions:
        if take:
            start = ranges.take(size, alignment)
            if start is not None:
                assert start % alignment == 0
                assert all(start + size <= s or s + n <= start for s, n in held)
                held.append((start, size))
        elif held:
            ranges.give(*held.pop(size % len(held)))
    for start, size in held:
        ranges.give(start, size)
    assert ranges.take(256, 1) == 0


def code_of(call: object, *args: object) -> int:
    try:
        call(*args)  # type: ignore[operator]
    except Failure as failure:
        return failure.code
    return 0


def test_only_live_bytes_can_be_located() -> None:
    """Inside an allocation yes; across its end, between two, after free: no."""
    memory = DeviceMemory(64 * MIB, visible=True)
    a = memory.take(1000, 1056, codes.HUGE_FIRST, 0.0)
    b = memory.take(1000, 1056, codes.HUGE_FIRST, 0.0)
    assert memory.locate(a + 999, 1, 0.0) == a + 999
    assert code_of(memory.locate, a + 999, 2, 0.0) == codes.RT_PARAM_INVALID
    assert code_of(memory.locate, b - 1, 1, 0.0) == codes.RT_PARAM_INVALID
    memory.give(a)
    assert code_of(memory.locate, a, 1, 0.0) == codes.RT_PARAM_INVALID
    assert memory.locate(b, 1000, 0.0) == b
    memory.close()


def test_the_librarys_own_memory_is_closed_to_callers() -> None:
    """Weights of a model are allocated, counted, and nobody's business."""
    memory = DeviceMemory(64 * MIB, visible=True)
    own = memory.take(MIB, MIB, codes.HUGE_FIRST, 0.0, readable=False)
    assert memory.free_bytes < memory.total_bytes
    assert code_of(memory.locate, own, 1, 0.0) == codes.RT_PARAM_INVALID
    memory.close()


def test_reclaiming_takes_what_was_not_used() -> None:
    """What was used since stays; what was not is gone for good, and may still be freed."""
    memory = DeviceMemory(64 * MIB, visible=True)
    idle = memory.take(100, 164, codes.HUGE_FIRST, now_s=0.0)
    busy = memory.take(100, 164, codes.HUGE_FIRST, now_s=0.0)
    memory.touch([busy], now_s=50.0)
    version = memory.version
    assert memory.reclaim(unused_since_s=40.0) == 1
    assert memory.version > version
    assert code_of(memory.locate, idle, 1, 60.0) == codes.DEVICE_MEM_ERROR
    assert memory.locate(busy, 100, 60.0) == busy
    memory.give(idle)
    memory.give(busy)
    assert memory.free_bytes == memory.total_bytes
    memory.close()


def test_a_huge_allocation_costs_memory_only_when_written() -> None:
    """16 GiB can be allocated on a small machine, and still read as the pattern."""
    memory = DeviceMemory(24 << 30, visible=False)
    address = memory.take(16 << 30, 16 << 30, codes.HUGE_FIRST, 0.0)
    for offset in (0, 7 << 30, (16 << 30) - 64):
        place = memory.locate(address + offset, 64, 0.0)
        view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 64).from_address(place))
        assert (view == 0xCB).all()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert resident < 4 << 30
    memory.give(address)
    memory.close()


def test_freeing_while_executing_is_settled_later() -> None:
    """Memory freed under a running kernel is gone for callers, and its pages come back after."""
    memory = DeviceMemory(64 * MIB, visible=True)
    address = memory.take(4 * MIB, 4 * MIB, codes.HUGE_FIRST, 0.0)
    free = memory.free_bytes
    memory.give(address, executing=True)
    assert code_of(memory.locate, address, 1, 0.0) == codes.RT_PARAM_INVALID
    assert memory.free_bytes == free
    memory.settle()
    assert memory.free_bytes == memory.total_bytes
    memory.close()
