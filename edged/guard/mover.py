"""Mover: takes the levers where the guard wants them, one move of each at a time.

A move may take seconds and may be refused: the loop never waits for it. A lever that refuses
several times in a row rests for a while, with its reason among the notes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

import structlog

from edged.guard.levers import Kind, Lever, LeverError
from edged.guard.levers.find import Found

log = structlog.get_logger("edged.guard")

_REFUSALS = 3  # in a row; a chip its firmware holds down refuses a higher clock, too
_REST_S = 300.0
_REPEAT_S = 30.0  # a helper that was started anew has put everything back
_STOP_WITHIN_S = 10.0
_SAME = 1e-3


@dataclass
class _Moved:
    """One lever. at: as last read back; aim: where it should be; asked: of the last move that was
    obeyed, for a driver may round it; until_s: it rests."""

    lever: Lever
    at: float | None = None
    aim: float | None = None
    asked: float | None = None
    asked_s: float = 0.0
    refusals: int = 0
    until_s: float = 0.0
    why: str = ""
    moving: asyncio.Task[None] | None = None

    def rests(self, now_s: float) -> bool:
        return now_s < self.until_s

    def wants(self, now_s: float) -> bool:
        """Whether a move is due."""
        if self.aim is None or self.moving is not None or self.rests(now_s):
            return False
        same = self.asked is not None and abs(self.asked - self.aim) <= _SAME
        return not same or now_s - self.asked_s >= _REPEAT_S


class Mover:
    """take() what was found, then aim() as often as wanted; stop() restores."""

    def __init__(self) -> None:
        self._levers: dict[Kind, _Moved] = {}
        self._missing: tuple[str, ...] = ()

    def take(self, found: Found) -> None:
        self._missing = found.notes
        for lever in (found.frequency, found.fan):
            if lever is not None:
                self._levers[lever.kind] = _Moved(lever)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not there, or does not obey now."""
        now_s = asyncio.get_running_loop().time()
        return self._missing + tuple(
            f"{kind}: {moved.lever.name} does not obey ({moved.why})"
            for kind, moved in self._levers.items()
            if moved.rests(now_s)
        )

    @property
    def frequencies_mhz(self) -> tuple[float, ...]:
        """Empty while there is no such lever, or it rests."""
        moved = self._obedient("frequency")
        return moved.lever.values if moved is not None else ()

    @property
    def has_fan(self) -> bool:
        return self._obedient("fan") is not None

    def _obedient(self, kind: Kind) -> _Moved | None:
        moved = self._levers.get(kind)
        now_s = asyncio.get_running_loop().time()
        return None if moved is None or moved.rests(now_s) else moved

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
        now_s = asyncio.get_running_loop().time()
        wanted: tuple[tuple[Kind, float | None], ...] = (
            ("frequency", frequency_mhz),
            ("fan", fan_ratio),
        )
        for kind, value in wanted:
            moved = self._levers.get(kind)
            if moved is None or value is None:
                continue
            moved.aim = value
            if moved.wants(now_s):
                moved.moving = asyncio.create_task(self._move(moved, value))

    async def _move(self, moved: _Moved, value: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            moved.at = await moved.lever.set(value)
            moved.asked, moved.asked_s, moved.refusals = value, loop.time(), 0
        except Exception as error:  # noqa: BLE001  # whatever it is, the lever did not obey
            why = str(error) if isinstance(error, LeverError) else repr(error)
            moved.refusals += 1
            moved.asked = None
            log.warning("lever_refused", lever=moved.lever.name, value=value, why=why)
            if moved.refusals >= _REFUSALS:
                moved.until_s, moved.why = loop.time() + _REST_S, why
                moved.refusals, moved.at = 0, None
                log.error("lever_rests", lever=moved.lever.name, rest_s=_REST_S)
        finally:
            moved.moving = None

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
    except Exception:  # whatever it is: the other levers and the sensors are to be stopped too
        log.exception("lever_not_restored")
