"""The simulated board's clock and fan as levers, where its parameter file has setters for them."""

from __future__ import annotations

import contextlib
import time

from edged.guard.levers import Kind, Lever, LeverError
from edged.guard.levers.knobs import clamped
from edged.twin.state import TwinState


class _FieldLever:
    """One command field of the state file; reads back what is stored there."""

    def __init__(self, state: TwinState, kind: Kind, field: str, values: tuple[float, ...]) -> None:
        self.name = f"twin/{kind}"
        self.kind: Kind = kind
        self.values = values
        self._state, self._field = state, field
        self._original: float | None = None

    async def set(self, value: float) -> float:
        wanted = clamped(self.kind, self.values, value)
        if self._original is None:
            self._original = self._state.get(self._field)
        return self._stored(wanted)

    async def restore(self) -> None:
        if self._original is not None:
            self._stored(self._original)
            self._original = None

    async def stop(self) -> None:
        with contextlib.suppress(LeverError):
            await self.restore()

    def _stored(self, value: float) -> float:
        self._state.command(time.monotonic(), {self._field: value})
        return self._state.get(self._field)


class TwinFrequencyLever(_FieldLever):
    """Gears of clock.gears_mhz. The chip's own throttle may hold the real clock lower."""

    def __init__(self, state: TwinState) -> None:
        super().__init__(state, "frequency", "frequency_mhz", state.board.clock.gears_mhz)


class TwinFanLever(_FieldLever):
    """From the lowest to the highest duty of fan.points."""

    def __init__(self, state: TwinState) -> None:
        duties = [duty for duty, _ in state.board.fan.points]
        super().__init__(state, "fan", "fan_ratio", (duties[0], duties[-1]))


def twin_levers(state: TwinState) -> tuple[Lever, ...]:
    """Those its board has; state stays open as long as they are used."""
    found: list[Lever] = []
    if state.board.clock.settable:
        found.append(TwinFrequencyLever(state))
    if state.board.fan.present:
        found.append(TwinFanLever(state))
    return tuple(found)
