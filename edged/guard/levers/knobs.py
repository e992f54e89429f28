"""Knobs: the blocking half of a lever, on files and commands of this machine.

Used by the root helper and, for a command pair, in the daemon's own helper thread. Values are
clamped here and proven by reading back. Standard library only; never writes to flash.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from edged.guard.levers import Kind, LeverError

Original: TypeAlias = "dict[str, int | float | str]"  # what restore() needs, kept as JSON

_FAN_TOLERANCE_RATIO = 0.03  # a driver may round a duty to its own steps
_CLOCK_TOLERANCE = 0.05
_SETTLE_S, _POLL_S = 1.0, 0.05  # how long a changed value may take to show
_MOST_OUTPUT_BYTES = 65536


class Knob(Protocol):
    """One thing to turn. All methods block, at most for a few time-outs, and raise LeverError."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def values(self) -> tuple[float, ...]: ...

    def read(self) -> float: ...

    def write(self, value: float) -> None:
        """value is one that clamped() returned."""

    def original(self) -> Original:
        """The present state, manual or automatic mode included."""

    def restore(self, original: Original) -> None: ...


def clamped(kind: Kind, values: Sequence[float], value: float) -> float:
    """The nearest value there is: of a frequency the gear below (cooler), else the lowest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LeverError("value: is not a number")
    if kind == "fan":
        return float(min(max(value, values[0]), values[-1]))
    return float(max((gear for gear in values if gear <= value), default=values[0]))


def move(knob: Knob, value: float) -> float:
    """Write a clamped value and wait until it can be read back; returns the reading."""
    knob.write(value)
    end_s = time.monotonic() + _SETTLE_S
    while True:
        found = knob.read()
        if proves(knob.kind, knob.values, value, found):
            return found
        if time.monotonic() >= end_s:
            break
        time.sleep(_POLL_S)
    raise LeverError(f"{knob.name}: was set to {value:g} but still reads {found:g}: not live")


def proves(kind: Kind, values: Sequence[float], wanted: float, found: float) -> bool:
    """Whether the reading is the wanted value and no other gear's."""
    if kind == "fan":
        return abs(found - wanted) <= _FAN_TOLERANCE_RATIO
    nearest = min(values, key=lambda gear: abs(gear - found))
    return nearest == wanted and abs(found - wanted) <= _CLOCK_TOLERANCE * wanted


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PwmFan:
    """A fan of the kernel's hwmon class: pwm 0..255, pwm_enable 1 = manual, above = automatic."""

    name: str  # "pwmfan/pwm1": the driver's name survives a new hwmon number
    path: Path
    values: tuple[float, ...]
    kind: Kind = "fan"

    def read(self) -> float:
        return _number(self.path) / 255

    def write(self, value: float) -> None:
        if self._enable.exists():
            _write(self._enable, 1)  # never 0: some chips do not leave it before a reboot
        _write(self.path, round(value * 255))

    def original(self) -> Original:
        found: Original = {"pwm": _number(self.path)}
        if self._enable.exists():
            found["enable"] = _number(self._enable)
        return found

    def restore(self, original: Original) -> None:
        try:
            _write(self.path, min(max(int(original["pwm"]), 0), 255))
        finally:  # automatic mode is worth having back even without the duty
            if "enable" in original:
                _write(self._enable, int(original["enable"]))

    @property
    def _enable(self) -> Path:
        return self.path.with_name(self.path.name + "_enable")


def pwm_fans(sysfs: Path, lowest_ratio: float) -> list[PwmFan]:
    """Every fan with a pwm file, in the order of its name."""
    found = []
    for path in sysfs.glob("class/hwmon/hwmon*/pwm[0-9]"):
        try:
            driver = (path.parent / "name").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        found.append(PwmFan(f"{driver}/{path.name}", path, (lowest_ratio, 1.0)))
    return sorted(found, key=lambda fan: fan.name)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise LeverError(f"cannot read {path}: {error}") from None


def _write(path: Path, number: int) -> None:
    """No O_CREAT: what is not there is not made."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(handle, b"%d\n" % number)
        finally:
            os.close(handle)
    except OSError as error:
        raise LeverError(f"cannot write {path}: {error.strerror}") from None


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandClock:
    """A vendor's own pair of commands. get prints MHz; `{mhz}` in set stands for the number."""

    name: str
    get: tuple[str, ...]
    set: tuple[str, ...]
    values: tuple[float, ...]
    timeout_s: float = 5.0
    kind: Kind = "frequency"

    def read(self) -> float:
        text = run(self.get, self.timeout_s)
        try:
            return float(text.split()[0])
        except (IndexError, ValueError):
            raise LeverError(f"{self.get[0]} printed {text[:60]!r}, not a number of MHz") from None

    def write(self, value: float) -> None:
        argv = tuple(word.replace("{mhz}", f"{value:g}") for word in self.set)
        said = run(argv, self.timeout_s)
        if "reboot" in said.lower():
            raise LeverError(f"{self.set[0]} asks for a reboot: not a lever that works live")

    def original(self) -> Original:
        return {"mhz": self.read()}

    def restore(self, original: Original) -> None:
        """A clock between the gears is restored as it was read."""
        found = float(original["mhz"])
        gears = [gear for gear in self.values if proves("frequency", self.values, gear, found)]
        self.write(gears[0] if gears else found)
        now = self.read()
        if abs(now - found) > _CLOCK_TOLERANCE * found:
            raise LeverError(f"{self.name}: was restored to {found:g} but reads {now:g}")


def run(argv: Sequence[str], timeout_s: float) -> str:
    """What the command printed. Raises LeverError when it is missing, slow or unhappy."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise LeverError(f"cannot run {argv[0]}: {error.strerror}") from None
    with process:
        try:
            printed = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            raise LeverError(f"{argv[0]} did not end within {timeout_s:g} s") from None
    text = printed[:_MOST_OUTPUT_BYTES].decode(errors="replace").strip()
    if process.returncode != 0:
        raise LeverError(f"{argv[0]} failed with {process.returncode}: {text[-120:]!r}")
    return text
