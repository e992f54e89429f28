"""TwinSensor: the simulated board as one more source of the guard. Reads, never commands."""

from __future__ import annotations

import time

from edged.guard.sensors import Raw, SensorError
from edged.twin.fields import StateError
from edged.twin.state import TwinState

_STEP_C = 0.1


class TwinSensor:
    """Tenths of a degree. The owner of the state closes it, after stop()."""

    name = "twin"

    def __init__(self, state: TwinState) -> None:
        self._state = state
        self._last: tuple[float, float] | None = None  # time, busy seconds

    async def read(self) -> Raw:
        now_s = time.monotonic()
        try:
            sample = self._state.sample(now_s)
            fields = self._state.fields()
        except (StateError, OSError, ValueError) as error:  # ValueError: closed
            raise SensorError(f"cannot read the simulated board: {error}") from None
        firmware = self._state.board.firmware
        return Raw(
            temperature_c=round(round(sample.temperature_c / _STEP_C) * _STEP_C, 1),
            frequency_mhz=sample.clock_mhz,
            power_w=sample.power_w,
            utilization_ratio=self._busy_ratio(now_s, fields["busy_s"], sample.busy),
            memory_used_bytes=int(fields["memory_used_bytes"]),
            memory_total_bytes=int(fields["memory_total_bytes"]),
            throttle_c=firmware.throttle_c,
            reset_c=firmware.reset_c,
            health="OK",
        )

    def _busy_ratio(self, now_s: float, busy_s: float, busy: bool) -> float:
        """Since the last reading; a step counts when it has ended."""
        last, self._last = self._last, (now_s, busy_s)
        if last is None or now_s <= last[0] or busy_s < last[1]:  # the first one, or another board
            return float(busy)
        return min(1.0, (busy_s - last[1]) / (now_s - last[0]))

    async def stop(self) -> None:
        """Nothing of ours runs."""
