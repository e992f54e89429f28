"""Plan: slot views + Limits -> what the next step runs. Pure, without numpy; the lab uses it too.

Mixed work alternates: one prefill chunk of one stream, then one decode step over a window of
slots, so a long prompt stalls nobody for more than a chunk. Chunks go in turn to the oldest and
to the shortest prompt. Never touches memory or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edged.core import Limits

ROTATE_TOKENS = 32  # a stream above a lowered max_batch waits for at most this many per rival
COMPACT_AFTER_STEPS = 16  # decode steps in too wide a window before a slot is moved
SHRINK_AFTER_STEPS = 64  # steps in too long a context before the slots are re-packed

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Gears:
    """Shapes an executor runs at, each ascending. tokens: of prefill chunks, empty = any."""

    batch: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]


@dataclass(frozen=True)
class SlotView:
    """A busy slot. rows: valid in its cache; remaining: ids not yet computed, 1 = it decodes.

    served: tokens drawn, counted so that newcomers start level; order: of arrival.
    """

    index: int
    rows: int
    remaining: int
    served: int
    order: int


class StepPlan(NamedTuple):
    """Run slots lo .. lo+batch-1 at T = tokens, S = context; fresh: (slot, new rows) of each."""

    kind: Kind
    lo: int
    batch: int
    tokens: int
    context: int
    fresh: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Move:
    """Copy a busy slot into a free one, then plan again."""

    source: int
    target: int


class Memory(NamedTuple):
    """What a plan remembers of the steps before it."""

    context: int
    last: Kind = "decode"
    favour_short: bool = False  # the next prefill chunk goes to the shortest, else to the oldest
    roomy_steps: int = 0  # in a row, in which a shorter context would have done
    roomy_context: int = 0  # the shortest context that would have done for all of these
    wide_steps: int = 0  # decode steps in a row, in which the window was wider than needed


def gear(value: int, gears: Sequence[int]) -> int:
    """The smallest gear >= value, else the largest; value itself when any shape will do."""
    return next((g for g in gears if g >= value), gears[-1]) if gears else value


def plan_step(
    views: Sequence[SlotView], slots: int, limits: Limits, gears: Gears, memory: Memory
) -> tuple[StepPlan | Move | None, Memory]:
    """The next step, or None when nothing may run, and the memory to pass next time."""
    if not views or limits.max_batch < 1 or limits.duty <= 0:
        return None, memory
    ready = [v for v in views if v.remaining == 1]
    filling = [v for v in views if v.remaining > 1]
    if filling and (not ready or memory.last == "decode"):
        view = min(filling, key=lambda v: (v.remaining if memory.favour_short else 0, v.order))
        step = _prefill(view, limits, gears)
        memory = memory._replace(last="prefill", favour_short=not memory.favour_short)
        return _at_context(step, views, gears, memory)
    members, most = _members(ready, limits, gears)
    step = _decode(members, slots, gears)
    wanted = min(len(ready), most)
    wide = step.batch > gear(wanted, gears.batch) or len(members) < wanted
    memory = memory._replace(wide_steps=memory.wide_steps + 1 if wide else 0)
    if memory.wide_steps >= COMPACT_AFTER_STEPS:
        memory = memory._replace(wide_steps=0)
        move = _compaction(ready, {v.index for v in views}, slots)
        if move is not None:
            return move, memory
    return _at_context(step, views, gears, memory._replace(last="decode"))


def _prefill(view: SlotView, limits: Limits, gears: Gears) -> StepPlan:
    # Not larger when nobody decodes: 64 ids cost per id what 256 do, and a cancel acts sooner.
    chunk = max(1, limits.prefill_chunk)
    tokens = gear(min(view.remaining, chunk), gears.tokens)
    fresh = ((view.index, min(view.remaining, chunk, tokens)),)
    return StepPlan("prefill", view.index, 1, tokens, 0, fresh)


def _members(ready: Sequence[SlotView], limits: Limits, gears: Gears) -> tuple[list[SlotView], int]:
    """Who decodes: the window of at most max_batch slots that holds the stream with the least
    progress and, besides it, as many others as possible; also how many it may hold."""
    widest = max(limits.max_batch, gears.batch[0])
    width = max(g for g in gears.batch if g <= widest)
    most = min(width, limits.max_batch)
    queue = sorted(ready, key=lambda v: (v.served // ROTATE_TOKENS, v.index))
    least = queue[0].index
    windows = (
        [v for v in queue if lo <= v.index < lo + width][:most]
        for lo in range(max(0, least - width + 1), least + 1)
    )
    best = min(windows, key=lambda w: (-len(w), [v.served // ROTATE_TOKENS for v in w]))
    return sorted(best, key=lambda v: v.index), most


def _decode(members: Sequence[SlotView], slots: int, gears: Gears) -> StepPlan:
    batch = gear(_span(members), gears.batch)
    lo = min(members[0].index, slots - batch)
    return StepPlan("decode", lo, batch, 1, 0, tuple((v.index, 1) for v in members))


def _span(views: Sequence[SlotView]) -> int:
    return views[-1].index - views[0].index + 1


def _at_context(
    step: StepPlan, views: Sequence[SlotView], gears: Gears, memory: Memory
) -> tuple[StepPlan, Memory]:
    """Grow at once; shrink after a while, to what sufficed all that while: re-packing costs a
    copy of every valid row."""
    fresh = dict(step.fresh)
    needed = gear(max(v.rows + fresh.get(v.index, 0) for v in views), gears.context)
    if needed >= memory.context:
        memory = memory._replace(context=needed, roomy_steps=0, roomy_context=0)
    else:
        sufficed = max(needed, memory.roomy_context)
        if memory.roomy_steps + 1 >= SHRINK_AFTER_STEPS:
            memory = memory._replace(context=sufficed, roomy_steps=0, roomy_context=0)
        else:
            steps = memory.roomy_steps + 1
            memory = memory._replace(roomy_steps=steps, roomy_context=sufficed)
    return step._replace(context=memory.context), memory


def _compaction(ready: Sequence[SlotView], busy: set[int], slots: int) -> Move | None:
    """Move an outermost decoding slot next to the others, if that narrows the window."""
    moves = []
    for edge, rest in ((ready[0], ready[1:]), (ready[-1], ready[:-1])):
        for target in set(range(slots)) - busy if rest else ():
            low, high = min(target, rest[0].index), max(target, rest[-1].index)
            moves.append((high - low + 1, edge.rows, edge.index, target))
    if not moves or min(moves)[0] >= _span(ready):
        return None
    _, _, source, target = min(moves)
    return Move(source, target)
