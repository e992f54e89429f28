"""The slot table: whose rows are kept, whose are given up, and where a stream goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edged.worker.slots import MIN_COPY_TOKENS, Slot, SlotTable


def used(table: SlotTable, tokens: list[int]) -> Slot:
    """A stream of these tokens came and went."""
    slot = table.take(list(tokens))
    assert slot is not None
    slot.rows = len(tokens)
    table.release(slot)
    return slot


IDS = st.lists(st.integers(0, 2), max_size=200)


@given(cached=IDS, tokens=IDS.filter(bool), rows=st.integers(0, 200))
def test_shared_is_the_longest_exact_prefix(
    cached: list[int], tokens: list[int], rows: int
) -> None:
    """Only valid rows count, token by token, and the last token is always left to compute."""
    slot = Slot(0, cached, min(rows, len(cached)))
    length = 0
    while length < min(slot.rows, len(tokens) - 1) and cached[length] == tokens[length]:
        length += 1
    assert slot.shared(tokens) == length


def test_a_follow_up_returns_to_its_slot() -> None:
    """The free slot with the longest shared prefix is taken and its rows are kept."""
    table = SlotTable(4)
    used(table, [1, 2, 3, 4])
    second = used(table, [9, 8, 7, 6, 5])
    slot = table.take([9, 8, 7, 6, 5, 1, 1])
    assert (slot, slot and slot.rows) == (second, 5)


def test_other_conversations_are_spared_while_there_is_room() -> None:
    """A new prompt takes an empty slot; when there is none, the one freed longest ago."""
    table = SlotTable(3)
    taken = [used(table, [i] * 5).index for i in (1, 2, 3)]
    assert taken == [0, 1, 2]
    used(table, [1] * 5)
    assert used(table, [4] * 5).index == 1


def test_busy_slots_stay_side_by_side() -> None:
    """Next to running streams a narrow window matters more than what a free slot holds."""
    table = SlotTable(8)
    used(table, [1] * 5)
    running = table.take([2] * 5)
    assert running is not None and running.index == 1
    neighbours = [table.take([3 + i] * 5) for i in range(3)]
    assert sorted(s.index for s in neighbours if s) in ([0, 2, 3], [2, 3, 4])


def test_a_longer_prefix_elsewhere_is_offered_for_copying() -> None:
    """Busy or free, another slot that shares clearly more is the donor."""
    table = SlotTable(4)
    prompt = list(range(50))
    first = table.take(list(prompt))
    assert first is not None
    first.rows = 40
    second = table.take([*prompt, 1])
    assert second is not None
    assert table.donor(second) == (first, 40)
    second.rows = 40 - MIN_COPY_TOKENS + 1
    assert table.donor(second) is None


def test_all_busy_is_none() -> None:
    """The table never queues."""
    table = SlotTable(1)
    assert table.take([1]) is not None
    assert table.take([1]) is None
    assert table.free_count == 0


def test_a_shrunk_slot_forgets_what_it_lost() -> None:
    """Rows beyond a shorter context are no longer valid."""
    table = SlotTable(1)
    slot = used(table, list(range(30)))
    table.truncate(16)
    assert (slot.rows, slot.tokens) == (16, list(range(16)))


def test_a_move_empties_the_source() -> None:
    """The copied rows belong to the new slot; the old one is free and holds nothing."""
    table = SlotTable(3)
    source, target = table.slots[2], table.slots[0]
    source.tokens, source.rows, source.busy = [1, 2, 3], 2, True
    table.move(source, target)
    assert (target.tokens, target.rows, target.busy) == ([1, 2, 3], 2, True)
    assert (source.tokens, source.rows, source.busy) == ([], 0, False)
