"""When the next worker is started."""

from __future__ import annotations

import asyncio

from edged.engine.due import Due


async def settled() -> None:
    """Whoever can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_due_is_not_waited_for() -> None:
    """A first start needs no turn of the loop, and says nothing of waiting."""
    left: list[float] = []
    await Due().wait(left.append)
    assert left == []


async def test_a_start_put_forward_takes_place_at_once() -> None:
    """Who waits an hour hears that it is due now."""
    due, left = Due(), list[float]()
    due.after(3600)
    waits = asyncio.create_task(due.wait(left.append))
    await settled()
    assert not waits.done()
    due.at_s = 0.0
    due.nudge()
    await waits
    assert len(left) == 1
    assert 3599 < left[0] <= 3600


async def test_parked_means_not_at_any_time() -> None:
    """What is due and parked waits until it is asked for, without a word of when."""
    due, left = Due(), list[float]()
    due.park()
    waits = asyncio.create_task(due.wait(left.append))
    await settled()
    due.nudge()
    await settled()
    assert not waits.done()
    due.unpark()
    await waits
    assert left == []
