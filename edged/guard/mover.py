"""Mover: takes the levers where the guard wants them, one move of each at a time.

A move may take seconds and may be refused: the loop never waits for it. A lever that refuses
several times in a row is given up, with its reason among the notes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

import structlog

from edged.guard.levers import Lever, LeverError
from edged.guard.levers.find import Found

log = structlog.get_logger("edged.guard")

_REFUSALS = 3  # in a row, then the lever is no lever any more
_STOP_WITHIN_S = 10.0
_SAME = 1e-3


@dataclass
class _Moved:
    """One lever. at: as last read back; aim: where it should be."""

    lever: Lever
    at: float | None = None
    aim: float | None = None
    asked: float | None = None  # of the last move that was obeyed; a driver may round it
    refusals: int = 0
    moving: asyncio.Task[None] | None = None


class Mover:
    """take() what was found, then aim() as often as wanted; stop() restores."""

    def __init__(self) -> None:
        self._levers: dict[str, _Moved] = {}
        self.notes: tuple[str, ...] = ()

    def take(self, found: Found) -> None:
        self.notes = found.notes
        for lever in (found.frequency, found.fan):
            if lever is not None:
                self._levers[lever.kind] = _Moved(lever)

    @property
    def frequencies_mhz(self) -> tuple[float, ...]:
        moved = self._levers.get("frequency")
        return moved.lever.values if moved is not None else ()

    @property
    def has_fan(self) -> bool:
        return "fan" in self._levers

    @property
    def frequency_mhz(self) -> float | None:
        """As last read back; None = not moved yet, or no such lever."""
        moved = self._levers.get("frequency")
        return moved.at if moved is not None else None

    @property
    def fan_ratio(self) -> float | None:
        moved = self._levers.get("fan")
        return moved.at if moved is not None else None

    def aim(self, frequency_mhz: float | None, fan_ratio: float | None) -> None:
        """None = leave it alone."""
        for kind, value in (("frequency", frequency_mhz), ("fan", fan_ratio)):
            moved = self._levers.get(kind)
            if moved is None or value is None:
                continue
            moved.aim = value
            if moved.moving is None and (moved.asked is None or abs(moved.asked - value) > _SAME):
                moved.moving = asyncio.create_task(self._move(kind, moved))

    async def _move(self, kind: str, moved: _Moved) -> None:
        assert moved.aim is not None
        aim = moved.aim
        try:
            moved.at = await moved.lever.set(aim)
            moved.asked, moved.refusals = aim, 0
        except LeverError as error:
            moved.refusals += 1
            log.warning("lever_refused", lever=moved.lever.name, value=aim, why=str(error))
            if moved.refusals >= _REFUSALS:
                self._give_up(kind, moved, str(error))
        finally:
            moved.moving = None

    def _give_up(self, kind: str, moved: _Moved, why: str) -> None:
        log.error("lever_lost", lever=moved.lever.name, why=why)
        del self._levers[kind]
        self.notes = (*self.notes, f"{kind}: {moved.lever.name} does not obey ({why})")
        moved.moving = asyncio.create_task(moved.lever.stop())  # it may still be put back

    async def stop(self) -> None:
        """Restore everything; bounded, for a dead driver must not hold up the end."""
        levers, self._levers = self._levers, {}
        await asyncio.gather(*(_ended(moved) for moved in levers.values()))


async def _ended(moved: _Moved) -> None:
    if moved.moving is not None:
        await _within(asyncio.shield(moved.moving))
    await _within(moved.lever.stop())


async def _within(work: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(work, _STOP_WITHIN_S)
    except asyncio.TimeoutError:
        log.error("lever_not_restored", within_s=_STOP_WITHIN_S)
