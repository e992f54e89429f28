"""Disposable child: one DCMI call for the work-power gear, its answer as one line of JSON.

`python -m edged.guard.levers.dcmi_gear LIBRARY list|get|set LEVEL`. First card, first device.
is_in_flash is always 0. Layouts: vendor's DCMI documentation; standard library only.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence

_LOW_POWER = 8  # main command
_TOPS_DETAILS, _SET_WORK_TOPS, _GET_WORK_TOPS = 6, 7, 8  # sub commands
_AICORE_CURRENT = 7  # frequency type
_MOST_GEARS, _MOST_CARDS = 10, 16


class _Gear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("work_tops", "aic_tops", "aic_freq", "aic_vol")),
        *((name, ctypes.c_uint) for name in ("cpu_freq", "cpu_vol")),
        ("reserve", ctypes.c_ubyte * 32),
    ]


class _Details(ctypes.Structure):
    _fields_ = [("tops_nums", ctypes.c_uint), ("gears", _Gear * _MOST_GEARS)]


class _Present(ctypes.Structure):
    _fields_ = [
        ("work_tops", ctypes.c_uint),
        ("tops_nums", ctypes.c_uint),
        ("reserve", ctypes.c_ubyte * 32),
    ]


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("work_tops", ctypes.c_uint),
        ("is_in_flash", ctypes.c_uint),
        ("reserve", ctypes.c_ubyte * 32),
    ]


class _DcmiError(Exception):
    """The call and its code."""


class _Dcmi:
    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._call("dcmi_init")
        count, cards = ctypes.c_int(), (ctypes.c_int * _MOST_CARDS)()
        self._call("dcmi_get_card_list", ctypes.byref(count), cards, _MOST_CARDS)
        if count.value < 1:
            raise _DcmiError("no card")
        self._card = int(cards[0])

    def gears(self) -> list[tuple[int, int, int]]:
        """(level, AI core MHz, CPU MHz) of each."""
        details = _Details()
        self._info(_TOPS_DETAILS, details)
        gears = details.gears[: min(details.tops_nums, _MOST_GEARS)]
        return [(gear.work_tops, gear.aic_freq, gear.cpu_freq) for gear in gears]

    def level(self) -> int:
        present = _Present()
        self._info(_GET_WORK_TOPS, present)
        return int(present.work_tops)

    def mhz(self) -> int:
        found = ctypes.c_uint()
        place = ctypes.byref(found)
        self._call("dcmi_get_device_frequency", self._card, 0, _AICORE_CURRENT, place)
        return found.value

    def set_level(self, level: int) -> None:
        if level not in [known for known, _, _ in self.gears()]:
            raise _DcmiError(f"level {level} is not among the device's gears")
        wanted = _Wanted(work_tops=level, is_in_flash=0)
        place, size = ctypes.byref(wanted), ctypes.sizeof(wanted)
        self._call("dcmi_set_device_info", self._card, 0, _LOW_POWER, _SET_WORK_TOPS, place, size)

    def _info(self, sub: int, target: ctypes.Structure) -> None:
        size = ctypes.c_uint(ctypes.sizeof(target))
        places = ctypes.byref(target), ctypes.byref(size)
        self._call("dcmi_get_device_info", self._card, 0, _LOW_POWER, sub, *places)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise _DcmiError(f"{name}: not in this library") from None
        if code != 0:
            raise _DcmiError(f"{name}: {_CODES.get(code, 'failed')} ({code})")


_CODES = {
    -8002: "not permitted, root is needed",
    -8006: "timed out",
    -8008: "no such device",
    -8013: "not in a container",
    -8020: "busy",
    -8255: "not supported by this board",
}


def main(argv: Sequence[str]) -> int:
    library, verb, *values = argv
    try:
        dcmi = _Dcmi(library)
        if verb == "list":
            print(json.dumps({"gears": dcmi.gears()}))
        elif verb == "get":
            print(json.dumps({"level": dcmi.level(), "mhz": dcmi.mhz()}))
        else:
            dcmi.set_level(int(values[0]))
            print("{}")
    except (OSError, _DcmiError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
