"""Plant: one board in virtual time. Integrates heat between events and keeps the accounts.

Whoever executes books a stretch of work; readers may look at any moment in between. Firmware
throttling may fall inside a stretch and lengthens it. Never reads a clock: time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from edged.twin.physics import (
    Board,
    ThermalState,
    busy_power_w,
    clock_mhz,
    cpu_power_w,
    firmware_throttles,
    step_time_s,
)

_SHORTEST_S = 1e-9


@dataclass
class Totals:
    """Accounts since the last reset; over_s: above the limit the plant was given."""

    seconds: float = 0.0
    joules: float = 0.0
    busy_s: float = 0.0
    degree_seconds: float = 0.0
    over_s: float = 0.0
    max_c: float = float("-inf")
    clock_changes: int = 0


@dataclass(frozen=True)
class _Stretch:
    """Constant power and clock until end_s."""

    end_s: float
    power_w: float
    mhz: float


@dataclass
class Plant:
    """wanted_mhz, fan_resistance, ambient_c and cpu_ratio are the inputs; set them after
    `sync(now)`. They act on the next stretch, heat and fan at once."""

    board: Board
    limit_c: float
    thermal: ThermalState
    wanted_mhz: float
    cpu_ratio: float = 0.0  # share of the time a CPU engine is busy
    throttled: bool = False  # as of the end of what is booked
    resets: int = 0  # times the chip reached its reset point
    now_s: float = 0.0
    totals: Totals = field(default_factory=Totals)
    _booked: deque[_Stretch] = field(default_factory=deque)
    _last_mhz: float = 0.0

    # --- inputs ----------------------------------------------------------------------------------

    def surround(self, ambient_c: float, resistance: float) -> None:
        """Ambient and the factor on every thermal resistance, from now on."""
        self.thermal = replace(self.thermal, ambient_c=ambient_c, resistance=resistance)

    @property
    def mhz(self) -> float:
        """The clock now."""
        if self._booked:
            return self._booked[0].mhz
        return clock_mhz(self.board, self.throttled, self.wanted_mhz)

    @property
    def temperature_c(self) -> float:
        return self.thermal.temperature_c

    @property
    def power_w(self) -> float:
        """Watts now, the CPU engine's included."""
        if self._booked:
            return self._booked[0].power_w
        return self.board.power.idle_w + cpu_power_w(self.board, self.cpu_ratio)

    # --- work ------------------------------------------------------------------------------------

    def execute(
        self, batch: int, tokens: int, context: int, streams: int, jitter: float = 1.0
    ) -> float:
        """Book one execution from now on; returns its seconds. `sync(now)` must precede it.

        A crossing of the firmware's throttle or release point changes the clock in the middle.
        """
        state, left, at_s = self.thermal, 1.0, self.now_s
        while left > _SHORTEST_S:
            mhz = clock_mhz(self.board, self.throttled, self.wanted_mhz)
            whole_s = jitter * step_time_s(self.board, batch, tokens, context, mhz, self.cpu_ratio)
            power_w = busy_power_w(self.board, batch, tokens, context, mhz, streams)
            power_w += cpu_power_w(self.board, self.cpu_ratio)
            dt_s = whole_s * left
            crossing_s = state.reaches_s(dt_s, power_w, self._switch_c())
            if crossing_s is not None:
                dt_s = max(crossing_s, _SHORTEST_S)
            state = state.advance(dt_s, power_w)
            left -= dt_s / whole_s
            at_s += dt_s
            self._booked.append(_Stretch(at_s, power_w, mhz))
            if crossing_s is not None:
                self.throttled = not self.throttled
        self.totals.busy_s += at_s - self.now_s
        return at_s - self.now_s

    def _switch_c(self) -> float:
        firmware = self.board.firmware
        return firmware.release_c if self.throttled else firmware.throttle_c

    # --- time ------------------------------------------------------------------------------------

    def sync(self, now_s: float) -> None:
        """Integrate up to now: booked stretches first, idle after them."""
        while self._booked and self.now_s < now_s:
            stretch = self._booked[0]
            end_s = min(stretch.end_s, now_s)
            self._pass(end_s - self.now_s, stretch.power_w, stretch.mhz)
            self.now_s = end_s
            if stretch.end_s <= now_s:
                self._booked.popleft()
        if now_s > self.now_s:
            idle_w = self.board.power.idle_w + cpu_power_w(self.board, self.cpu_ratio)
            self._pass(now_s - self.now_s, idle_w, self.mhz)
            self.now_s = now_s
        if not self._booked:
            self.throttled = firmware_throttles(self.board, self.throttled, self.temperature_c)

    def _pass(self, dt_s: float, power_w: float, mhz: float) -> None:
        if dt_s <= 0:
            return
        before_c = self.temperature_c
        totals = self.totals
        totals.degree_seconds += self.thermal.mean_c(dt_s, power_w) * dt_s
        self.thermal = self.thermal.advance(dt_s, power_w)
        after_c = self.temperature_c
        totals.seconds += dt_s
        totals.joules += power_w * dt_s
        totals.max_c = max(totals.max_c, before_c, after_c)
        totals.over_s += dt_s * _share_above(before_c, after_c, self.limit_c)
        if mhz != self._last_mhz:
            totals.clock_changes += self._last_mhz > 0
            self._last_mhz = mhz
        if before_c < self.board.firmware.reset_c <= after_c:
            self.resets += 1


def _share_above(before_c: float, after_c: float, limit_c: float) -> float:
    """Share of a short stretch spent above the limit, on a straight line."""
    low, high = min(before_c, after_c), max(before_c, after_c)
    if high <= limit_c:
        return 0.0
    if low >= limit_c:
        return 1.0
    return (high - limit_c) / (high - low)
