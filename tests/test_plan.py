"""plan_step is a pure function: what it may and may not choose, for any views and limits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from edged.core import Limits
from edged.worker.plan import (
    COMPACT_AFTER_STEPS,
    SHRINK_AFTER_STEPS,
    Gears,
    Memory,
    Move,
    SlotView,
    StepPlan,
    gear,
    plan_step,
)

SLOTS = 8
FREE = Gears(tuple(range(1, SLOTS + 1)), (), (256, 512, 1024, 2048))
COMPILED = Gears((1, 4, 8), (16, 64), (512, 2048))
GEARS = st.sampled_from([FREE, COMPILED])
LIMITS = st.builds(
    Limits, max_batch=st.integers(1, SLOTS), prefill_chunk=st.integers(1, 128), duty=st.just(1.0)
)
VIEWS = st.lists(
    st.builds(
        SlotView,
        index=st.integers(0, SLOTS - 1),
        rows=st.integers(0, 900),
        remaining=st.one_of(st.just(1), st.integers(1, 900)),
        served=st.integers(0, 200),
        order=st.integers(0, 1000),
    ),
    unique_by=lambda view: view.index,
    min_size=1,
    max_size=SLOTS,
).map(lambda views: sorted(views, key=lambda view: view.index))


def decoding(*indices: int, rows: int = 10) -> list[SlotView]:
    return [SlotView(i, rows, 1, 0, i) for i in indices]


@settings(deadline=None)
@given(views=VIEWS, limits=LIMITS, gears=GEARS)
def test_a_step_is_within_limits_and_gears(
    views: list[SlotView], limits: Limits, gears: Gears
) -> None:
    """Never more streams than max_batch, never a shape without a gear, never a lost row."""
    step, memory = plan_step(views, SLOTS, limits, gears, Memory(gears.context[0]))
    assert isinstance(step, StepPlan)
    by_index = {view.index: view for view in views}
    assert 0 < len(step.fresh) <= limits.max_batch
    assert step.lo >= 0 and step.lo + step.batch <= SLOTS
    assert step.batch in gears.batch and step.context in gears.context
    assert step.context == memory.context
    for index, count in step.fresh:
        assert step.lo <= index < step.lo + step.batch
        assert 1 <= count <= min(by_index[index].remaining, step.tokens)
        assert by_index[index].rows + count <= step.context
    assert all(view.rows <= step.context for view in views)
    if step.kind == "decode":
        assert step.tokens == 1 and all(by_index[i].remaining == 1 for i, _ in step.fresh)
    else:
        assert step.batch == 1 and by_index[step.lo].remaining > 1
        assert not gears.tokens or step.tokens in gears.tokens


@settings(deadline=None, max_examples=50)
@given(views=VIEWS, limits=LIMITS, gears=GEARS)
def test_every_stream_makes_progress(views: list[SlotView], limits: Limits, gears: Gears) -> None:
    """Obeyed for long enough, the plan serves each live stream; prefill and decode alternate
    while both are wanted."""
    served = {view.order: 0 for view in views}
    views = [replace(view, order=i, served=0) for i, view in enumerate(views)]
    live = {view.index: view for view in views}
    memory, kinds = Memory(gears.context[0]), []
    for _ in range(len(views) * 2 * (32 + 900)):
        mixed = {v.remaining > 1 for v in live.values()} == {True, False}
        ordered = sorted(live.values(), key=lambda v: v.index)
        step, memory = plan_step(ordered, SLOTS, limits, gears, memory)
        if isinstance(step, Move):
            live[step.target] = replace(live.pop(step.source), index=step.target)
            continue
        assert step is not None
        if mixed and kinds:
            assert step.kind != kinds[-1] or not kinds[-1]
        kinds.append(step.kind if mixed else "")
        for index, count in step.fresh:
            view = live[index]
            done = view.remaining == count
            rows = view.rows if done else view.rows + count  # decode in place: rows stay bounded
            remaining = 1 if done else view.remaining - count
            live[index] = replace(view, rows=rows, remaining=remaining, served=view.served + done)
        if all(view.served for view in live.values()):
            return
    raise AssertionError(f"starved: {[v for v in live.values() if not v.served]} {served}")


def test_nothing_runs_without_streams_or_permission() -> None:
    """No views, max_batch 0 or duty 0: no step, and the memory is untouched."""
    memory = Memory(256)
    assert plan_step([], SLOTS, Limits(8), FREE, memory) == (None, memory)
    assert plan_step(decoding(0), SLOTS, Limits(0), FREE, memory) == (None, memory)
    assert plan_step(decoding(0), SLOTS, Limits(8, duty=0.0), FREE, memory) == (None, memory)


def test_chunks_go_in_turn_to_the_oldest_and_to_the_shortest() -> None:
    """A short question is not held up by a long document, nor the document by questions."""
    views = [SlotView(0, 0, 900, 0, 1), SlotView(1, 0, 500, 0, 2), SlotView(2, 0, 20, 0, 3)]
    memory, order = Memory(256), []
    for _ in range(4):
        step, memory = plan_step(views, SLOTS, Limits(8), FREE, memory)
        assert isinstance(step, StepPlan)
        order.append(step.lo)
    assert order == [0, 2, 0, 2]


def test_the_context_grows_at_once_and_shrinks_to_what_sufficed() -> None:
    """Growth is immediate; a shrink waits, and leaves room for the longest of that while."""
    step, memory = plan_step(decoding(0, rows=512), SLOTS, Limits(8), FREE, Memory(256))
    assert isinstance(step, StepPlan) and step.context == 1024
    contexts = []
    for i in range(SHRINK_AFTER_STEPS):
        rows = 300 if i == 3 else 10
        step, memory = plan_step(decoding(0, rows=rows), SLOTS, Limits(8), FREE, memory)
        assert isinstance(step, StepPlan)
        contexts.append(step.context)
    assert contexts == [1024] * (SHRINK_AFTER_STEPS - 1) + [512]


def test_a_hole_is_closed_only_when_it_lasts() -> None:
    """The outermost stream moves next to the others after a number of wide steps."""
    memory, moves = Memory(256), []
    for i in range(COMPACT_AFTER_STEPS):
        result, memory = plan_step(decoding(0, 5, 6), SLOTS, Limits(8), FREE, memory)
        moves += [(i, result)] if isinstance(result, Move) else []
    assert moves == [(COMPACT_AFTER_STEPS - 1, Move(0, 4))]


def test_nothing_moves_when_it_would_not_help() -> None:
    """A dense window, or one whose gear stays the same, is left alone."""
    for views, gears in (
        (decoding(2, 3, 4), FREE),
        (decoding(0, 3, 4, 7), Gears((8,), (), (256,))),
    ):
        memory = Memory(256)
        for _ in range(3 * COMPACT_AFTER_STEPS):
            result, memory = plan_step(views, SLOTS, Limits(8), gears, memory)
            assert isinstance(result, StepPlan)


def test_a_lowered_batch_narrows_the_window() -> None:
    """max_batch bounds the slots a step spans, for holes cost as much as streams."""
    for most in range(1, SLOTS + 1):
        step, _ = plan_step(decoding(0, 2, 3, 7), SLOTS, Limits(most), FREE, Memory(256))
        assert isinstance(step, StepPlan)
        assert step.batch <= most
        assert (0, 1) in step.fresh


def test_gear_is_the_smallest_that_holds() -> None:
    """Above the largest gear the largest is meant; without gears every shape will do."""
    assert [gear(v, (1, 4, 8)) for v in (1, 2, 4, 5, 9)] == [1, 4, 4, 8, 8]
    assert gear(13, ()) == 13
