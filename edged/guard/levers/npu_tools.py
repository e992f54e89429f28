"""Knobs of Ascend boards: the fan through npu-smi, the work-power gear through DCMI.

DCMI's library is loaded in a disposable child only (dcmi_gear.py), for its mailbox may block.
The gear is never written to flash. Which answers are real: vendor documentation of the 200I A2.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged.guard.levers import Kind, LeverError
from edged.guard.levers.knobs import Original, run

NPU_SMI = ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi")
LIBDCMI = (
    "/usr/lib64/libdcmi.so",
    "/usr/local/Ascend/driver/lib64/driver/libdcmi.so",
    "/usr/local/dcmi/libdcmi.so",
)
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NpuSmiFan:
    """`npu-smi set -t pwm-mode|pwm-duty-ratio` on 310B boards in RC mode; root, not containers."""

    tool: str
    values: tuple[float, ...]
    name: str = "npu-smi/pwm"
    kind: Kind = "fan"

    def read(self) -> float:
        return self._duty() / 100

    def write(self, value: float) -> None:
        self._set("pwm-mode", 0)
        self._set("pwm-duty-ratio", round(value * 100))

    def original(self) -> Original:
        return {"mode": self._mode(), "duty": self._duty()}

    def restore(self, original: Original) -> None:
        duty = min(max(int(original["duty"]), 0), 100)
        if original["mode"] == "auto":
            self._set("pwm-mode", 1)
        else:
            self._set("pwm-mode", 0)
            self._set("pwm-duty-ratio", duty)

    def _mode(self) -> str:
        text = self._said("info", "-t", "pwm-mode")
        match = re.search(r"pwm-mode\s*:\s*(manual|auto)\b", text, re.I)
        if match is None:
            raise LeverError(f"npu-smi tells no pwm-mode: {text[-120:]!r}")
        return match[1].lower()

    def _duty(self) -> int:
        text = self._said("info", "-t", "pwm-duty-ratio")
        match = re.search(r"pwm-duty-ratio\s*(?:\(%\))?\s*:\s*(\d{1,3})\b", text, re.I)
        if match is None:
            raise LeverError(f"npu-smi tells no pwm-duty-ratio: {text[-120:]!r}")
        return int(match[1])

    def _set(self, what: str, value: int) -> None:
        """The read-back is the proof: what it prints differs between versions."""
        self._said("set", "-t", what, "-d", str(value))

    def _said(self, *words: str) -> str:
        return run((self.tool, *words), _TIMEOUT_S)


@dataclass(frozen=True)
class WorkPowerGear:
    """DCMI's work-power level: a discrete gear that may or may not be live on a board.

    read() is the clock the AI core really has, so a level that waits for a reboot proves nothing.
    """

    library: str
    levels: dict[float, int]  # MHz -> level
    name: str = "dcmi/work-power"
    kind: Kind = "frequency"

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(sorted(self.levels))

    def read(self) -> float:
        found = _dcmi(self.library, "get")
        return float(found["mhz"])

    def write(self, value: float) -> None:
        _dcmi(self.library, "set", str(self.levels[value]))

    def original(self) -> Original:
        return {"level": int(_dcmi(self.library, "get")["level"])}

    def restore(self, original: Original) -> None:
        level = int(original["level"])
        _dcmi(self.library, "set", str(level))
        if _dcmi(self.library, "get")["level"] != level:
            raise LeverError(f"{self.name}: level {level} was not taken back")


def npu_smi_fan(tool: str, lowest_ratio: float) -> NpuSmiFan:
    """Raises LeverError when the tool is missing or tells of no fan."""
    path = tool or next((path for path in NPU_SMI if Path(path).exists()), "")
    if not path:
        raise LeverError("no npu-smi")
    fan = NpuSmiFan(path, (lowest_ratio, 1.0))
    fan.original()
    return fan


def work_power_gear(library: str) -> WorkPowerGear:
    """Raises LeverError when there is no library, no device or only one gear."""
    path = library or next((path for path in LIBDCMI if Path(path).exists()), "")
    if not path:
        raise LeverError("no libdcmi.so")
    best: dict[float, tuple[int, int]] = {}
    for level, mhz, cpu_mhz in _dcmi(path, "list")["gears"]:
        # Levels may differ in the CPU's clock alone: keep the one that leaves it highest.
        if mhz > 0 and cpu_mhz > best.get(float(mhz), (0, -1))[1]:
            best[float(mhz)] = (level, cpu_mhz)
    if len(best) < 2:
        raise LeverError("DCMI tells fewer than two work-power gears")
    return WorkPowerGear(path, {mhz: level for mhz, (level, _) in best.items()})


def _dcmi(library: str, *words: str) -> dict[str, Any]:
    program = (sys.executable, "-I", "-m", "edged.guard.levers.dcmi_gear")
    text = run((*program, library, *words), 2 * _TIMEOUT_S)
    try:
        found = json.loads(text.splitlines()[-1])  # the library may print before
    except (ValueError, IndexError):
        found = None
    if not isinstance(found, dict):
        raise LeverError(f"the DCMI child printed {text[-120:]!r}")
    return found
