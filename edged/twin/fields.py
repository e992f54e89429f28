"""Layout of the simulated board's state file: named numbers at fixed places.

Each field has one writer at a time and is stored by one aligned 8-byte write, so readers of other
processes need no lock and never see half a value.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from edged.errors import EdgedError

STATE_FILE = "state.bin"
SIZE_BYTES = 4096
MAGIC = float(0x45474554)  # "EGET"
VERSION = 1.0
_NAME_AT, _NAME_BYTES = 2048, 1024
HEAT_TERMS = 4  # thermal stages a board may have

# Written by whoever creates or commands the twin.
COMMAND = (
    "time_scale",  # each execute lasts max(native, modelled * scale); 0 = native pace
    "run_mode",  # 0 RC, 1 EP
    "hold_gil",  # 1 = a synchronous execute or load keeps the interpreter lock
    "threads",  # of onnxruntime; 0 = all cores
    "cpu_busy_ratio",  # of a CPU engine on the same die
    "frequency_mhz",  # wanted by software
    "fan_ratio",  # duty, 0..1
    "resistance",  # factor on every thermal resistance besides the fan's
)
# Written under the lock of faults.py: changes whenever faults.json does.
_FAULTS = ("faults_version",)
# Written by the process that has the device open.
DEVICE = (
    "pid",
    "allocations_total",
    "frees_total",
    "memory_used_bytes",
    "memory_peak_bytes",
    "memory_total_bytes",
    "loads_total",
    "steps_total",
    "device_time_s",  # modelled
    "busy_s",  # really spent executing
    "busy_joules",
    "overruns_total",  # executes that took longer than modelled * scale
    "step_started_s",  # of the execution under way; 0 = none
    "step_until_s",  # when the board itself would be done; the host may take longer
    "step_power_w",
)
# Written under the lock of state.py, alternately in two copies.
HEAT = ("at_s", "throttled", "ambient_c", "resistance", *(f"rise_{i}" for i in range(HEAT_TERMS)))
_ALL = ("magic", "version", "newer_heat", *_FAULTS, *COMMAND, *DEVICE)
_PLACES = {name: place for place, name in enumerate(_ALL)}


class StateError(EdgedError):
    """The file is not a twin's state; the message tells what to do."""


class Fields:
    """The mapped file of SIZE_BYTES. Whole numbers are exact up to 2**53."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("r+b")
        self._map = mmap.mmap(self.file.fileno(), SIZE_BYTES)
        self._view = memoryview(self._map).cast("d")

    def close(self) -> None:
        self._view.release()
        self._map.close()
        self.file.close()

    def get(self, field: str) -> float:
        return float(self._view[_PLACES[field]])

    def set(self, field: str, value: float) -> None:
        self._view[_PLACES[field]] = value

    def add(self, field: str, value: float) -> None:
        """For the field's only writer."""
        self._view[_PLACES[field]] += value

    def heat(self) -> list[float]:
        """The newer copy, in the order of HEAT; read again if it was overwritten meanwhile."""
        while True:
            newer = self.get("newer_heat")
            at = _heat_place(newer)
            values = [float(v) for v in self._view[at : at + len(HEAT)]]
            if self.get("newer_heat") - newer < 2:
                return values

    def set_heat(self, values: list[float]) -> None:
        """Fill the older copy, then name it the newer one; a death in between changes nothing."""
        newer = self.get("newer_heat") + 1
        at = _heat_place(newer)
        for i, value in enumerate(values):
            self._view[at + i] = value
        self.set("newer_heat", newer)

    def set_board(self, name: str) -> None:
        data = name.encode()
        if len(data) >= _NAME_BYTES:
            raise StateError(f"board path of {len(data)} bytes is too long; use a shorter one")
        self._map[_NAME_AT : _NAME_AT + _NAME_BYTES] = data.ljust(_NAME_BYTES, b"\0")


def board_of(folder: Path) -> str:
    """The board a twin was created with, as boards.load takes it. Raises StateError."""
    path = folder / STATE_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(
            f"no twin in {folder}: {error.strerror}; start it with `edged run --twin`"
        ) from None
    if len(data) != SIZE_BYTES or memoryview(data).cast("d")[:2].tolist() != [MAGIC, VERSION]:
        raise StateError(f"{path} is not a twin's state file; remove it and start again")
    return data[_NAME_AT : _NAME_AT + _NAME_BYTES].rstrip(b"\0").decode()


def _heat_place(number: float) -> int:
    return len(_PLACES) + int(number) % 2 * len(HEAT)
