"""The simulated board between processes: counters, commands and heat in one mapped file.

Sensors integrate on read and write nothing; steps and levers write the heat under a file lock.
The state survives kill -9 of any of them. Fields and their writers: fields.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edged.twin import boards
from edged.twin.fields import (
    COMMAND,
    DEVICE,
    HEAT_TERMS,
    MAGIC,
    SIZE_BYTES,
    STATE_FILE,
    VERSION,
    Fields,
    StateError,
    board_of,
)
from edged.twin.physics import Board, ThermalState, clock_mhz, fan_resistance, firmware_throttles

_MOMENT_S = 0.1  # of wall time


@dataclass(frozen=True)
class Sample:
    """What sensors would see. power_w is the whole board's, a CPU engine included."""

    temperature_c: float
    clock_mhz: float
    throttled: bool
    power_w: float
    busy: bool


@dataclass(frozen=True)
class _Heat:
    at_s: float
    throttled: bool
    thermal: ThermalState


class TwinState:
    """now_s is always time.monotonic(): one clock for all processes of a machine."""

    def __init__(self, folder: Path) -> None:
        """Raises StateError when there is no twin, ConfigError when its board is gone."""
        self.board: Board = boards.load(board_of(folder))
        self.folder = folder
        self._fields = Fields(folder / STATE_FILE)
        self.get, self.set, self.add = self._fields.get, self._fields.set, self._fields.add

    def close(self) -> None:
        self._fields.close()

    def fields(self) -> dict[str, float]:
        """Commands and counters by name; what a dead process held is free again."""
        found = {name: self.get(name) for name in (*COMMAND, *DEVICE)}
        if not self.device_open():
            found |= {"pid": 0.0, "memory_used_bytes": 0.0, "step_started_s": 0.0}
        return found

    def device_open(self) -> bool:
        """Whether a living process has the device open."""
        pid = int(self.get("pid"))
        return pid == os.getpid() or (pid > 0 and _alive(pid))

    def sample(self, now_s: float) -> Sample:
        """Extrapolated to now; writes nothing."""
        return self._sample(self._advanced(now_s))

    def clock_mhz(self, now_s: float) -> float:
        """The clock a step starts at; within a moment of the last one nothing has cooled down."""
        at_s, throttled = self._fields.heat()[:2]
        held_down = bool(throttled)
        if held_down and now_s - at_s > _MOMENT_S:
            held_down = self._advanced(now_s).throttled
        return clock_mhz(self.board, held_down, self.get("frequency_mhz"))

    # --- the device's process --------------------------------------------------------------------

    def step_begins(self, now_s: float, power_w: float, device_s: float) -> None:
        """The board draws power_w from now on, for device_s of its own time. Stores, no lock.

        At native pace it draws it until the step ends.
        """
        scale = self.get("time_scale")
        self.set("step_until_s", now_s + device_s * scale if scale > 0 else math.inf)
        self.set("step_power_w", power_w)
        self.set("step_started_s", now_s)

    def step_ends(self, now_s: float, device_s: float) -> Sample:
        """Integrates the heat of the step begun last and counts it; device_s: modelled time."""
        power_w = self.get("step_power_w")
        took_s = min(now_s, self.get("step_until_s")) - self.get("step_started_s")
        with self._locked():
            heat = self._advanced(now_s)
            self.set("step_started_s", 0.0)
            self._write(heat)
        self.add("steps_total", 1)
        self.add("device_time_s", device_s)
        self.add("busy_s", took_s)  # of the board's work, not of a slow host
        self.add("busy_joules", took_s * self._rate() * power_w)
        return self._sample(heat)

    # --- commands --------------------------------------------------------------------------------

    def command(self, now_s: float, values: Mapping[str, float]) -> None:
        """Change command fields; the time until now counts with the old ones."""
        _check(values)
        with self._locked():
            heat = self._advanced(now_s)
            for field, value in values.items():
                self.set(field, value)
            self._write(heat)

    def set_temperature(self, now_s: float, temperature_c: float) -> None:
        """The die jumps there, and cools or warms from there on."""
        with self._locked():
            heat = self._advanced(now_s)
            first, *others = heat.thermal.rises_c
            first += temperature_c - heat.thermal.temperature_c
            throttled = firmware_throttles(self.board, heat.throttled, temperature_c)
            thermal = replace(heat.thermal, rises_c=(first, *others))
            self._write(_Heat(heat.at_s, throttled, thermal))

    def set_ambient(self, now_s: float, ambient_c: float) -> None:
        with self._locked():
            heat = self._advanced(now_s)
            self._write(replace(heat, thermal=replace(heat.thermal, ambient_c=ambient_c)))

    # --- heat ------------------------------------------------------------------------------------

    def _advanced(self, now_s: float) -> _Heat:
        """The stored heat plus the time since: idle until the step under way began, busy since."""
        at_s, throttled, ambient_c, resistance, *rises = self._fields.heat()
        terms = self.board.thermal.terms
        thermal = ThermalState(terms, ambient_c, tuple(rises[: len(terms)]), resistance)
        now_s = max(now_s, at_s)
        began_s = ended_s = now_s
        if self._stepping():
            began_s = min(max(self.get("step_started_s"), at_s), now_s)
            ended_s = min(max(self.get("step_until_s"), began_s), now_s)
        spans = ((at_s, began_s, False), (began_s, ended_s, True), (ended_s, now_s, False))
        for start_s, end_s, busy in spans:
            if end_s > start_s:
                passed_s = (end_s - start_s) * self._rate()
                thermal = thermal.advance(passed_s, self._power_w(busy))
        held_down = firmware_throttles(self.board, bool(throttled), thermal.temperature_c)
        return _Heat(now_s, held_down, thermal)

    def _write(self, heat: _Heat) -> None:
        """Under the lock. The resistance stored is the one that counts from now on."""
        factor = fan_resistance(self.board, self.get("fan_ratio")) * self.get("resistance")
        thermal = heat.thermal
        self._fields.set_heat(
            [heat.at_s, float(heat.throttled), thermal.ambient_c, factor, *thermal.rises_c]
        )

    def _sample(self, heat: _Heat) -> Sample:
        busy = self._stepping()
        clock = clock_mhz(self.board, heat.throttled, self.get("frequency_mhz"))
        power_w = self._power_w(busy)
        return Sample(heat.thermal.temperature_c, clock, heat.throttled, power_w, busy)

    def _stepping(self) -> bool:
        return self.get("step_started_s") > 0 and self.device_open()

    def _power_w(self, busy: bool) -> float:
        own_w = self.get("step_power_w") if busy else self.board.power.idle_w
        return own_w + self.board.cpu.heat_w * self.get("cpu_busy_ratio")

    def _rate(self) -> float:
        """Board seconds per second: a stretched or squeezed pace takes the heat along."""
        scale = self.get("time_scale")
        return 1.0 / scale if scale > 0 else 1.0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Among processes; the kernel drops the lock with its holder."""
        fcntl.flock(self._fields.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fields.file, fcntl.LOCK_UN)


def create(folder: Path, board: str, command: Mapping[str, float] | None = None) -> TwinState:
    """A rested board in `folder`, in place of any other. board: as boards.load takes it.

    command: fields of the first group; default native pace, the board's own run mode, top gear.
    """
    loaded = boards.load(board)
    if len(loaded.thermal.terms) > HEAT_TERMS:
        raise StateError(f"board {board}: thermal.terms may have at most {HEAT_TERMS} entries")
    values = {
        "run_mode": float(loaded.run_mode),
        "frequency_mhz": loaded.max_mhz,
        "fan_ratio": loaded.fan.default_ratio,
        "resistance": 1.0,
        **(command or {}),
    }
    _check(values)
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".state-")
    os.write(handle, bytes(SIZE_BYTES))
    os.close(handle)
    with contextlib.closing(Fields(Path(temporary))) as fields:
        for name, value in {"magic": MAGIC, "version": VERSION, **values}.items():
            fields.set(name, value)
        fields.set_board(board)
        rest = ThermalState.at_rest(loaded)
        fields.set_heat([time.monotonic(), 0.0, rest.ambient_c, 1.0, *rest.rises_c])
    Path(temporary).replace(folder / STATE_FILE)
    return TwinState(folder)


def _alive(pid: int) -> bool:
    """A zombie has already let go of its device."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _check(values: Mapping[str, float]) -> None:
    unknown = values.keys() - set(COMMAND)
    if unknown:
        raise StateError(f"no such field: {', '.join(sorted(unknown))}; there are {COMMAND}")
