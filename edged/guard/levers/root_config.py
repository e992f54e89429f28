"""What the root helper may move: /etc/edged/levers.toml, root's own file, and this board.

A client can name nothing but what is found here. Standard library, and tomli on Python 3.10.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged.errors import ConfigError
from edged.guard.levers import LeverError
from edged.guard.levers.knobs import CommandClock, Knob, pwm_fans
from edged.guard.levers.npu_tools import npu_smi_fan, work_power_gear

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DEFAULTS: dict[str, Any] = {
    "user": "edged",
    "fan": "auto",
    "fan_lowest_ratio": 0.4,
    "npu_smi": "",
    "frequency_get": [],
    "frequency_set": [],
    "frequencies_mhz": [],
    "work_power_gears": True,
    "dcmi_library": "",
}


@dataclass(frozen=True)
class Allowed:
    """knobs: best first. notes: what is not there and why. uids: who may ask."""

    knobs: tuple[Knob, ...]
    notes: tuple[str, ...]
    uids: frozenset[int]


def read(path: Path, sysfs: Path) -> Allowed:
    """Raises ConfigError when the file is not root's own or has a mistake."""
    values = _values(path)
    found: list[Knob] = []
    notes: list[str] = []
    if values["frequency_get"]:
        argvs = tuple(values["frequency_get"]), tuple(values["frequency_set"])
        gears = tuple(float(mhz) for mhz in values["frequencies_mhz"])
        found.append(CommandClock("command/clock", *argvs, gears))
    if values["work_power_gears"]:
        try:
            found.append(work_power_gear(values["dcmi_library"]))
        except LeverError as error:
            notes.append(f"frequency: {error}")
    fans, fan_notes = _fans(values, sysfs)
    return Allowed((*found, *fans), (*notes, *fan_notes), _uids(values["user"]))


def _fans(values: dict[str, Any], sysfs: Path) -> tuple[list[Knob], list[str]]:
    wanted, lowest = values["fan"], float(values["fan_lowest_ratio"])
    if wanted == "off":
        return [], ["fan: switched off in levers.toml"]
    fans: list[Knob] = list(pwm_fans(sysfs, lowest))
    notes = []
    if wanted == "auto" and len(fans) > 1:
        names = ", ".join(fan.name for fan in fans)
        notes.append(f"fan: several fans ({names}); name the NPU's as fan in levers.toml")
        fans = []
    try:
        fans.append(npu_smi_fan(values["npu_smi"], lowest))
    except LeverError as error:
        notes.append(f"fan: {error}")
    if wanted != "auto":
        notes += [f"fan: no {wanted} here"] if wanted not in [fan.name for fan in fans] else []
        fans = [fan for fan in fans if fan.name == wanted]
    return fans, notes


def _uids(user: str) -> frozenset[int]:
    try:
        return frozenset({0, pwd.getpwnam(user).pw_uid})
    except KeyError:
        return frozenset({0})


def _values(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in (0, os.geteuid()) or about.st_mode & (
                stat.S_IWGRP | stat.S_IWOTH
            ):
                raise ConfigError(f"{path}: must belong to root and be writable by nobody else")
            found = tomllib.load(file)
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use {path}: {error}") from None
    for name, value in found.items():
        if name not in _DEFAULTS:
            raise ConfigError(f"{path}: unknown key {name}; there are {', '.join(_DEFAULTS)}")
        _check(f"{path}: {name}", name, value)
    values = {**_DEFAULTS, **found}
    _check_commands(path, values)
    return values


def _check(where: str, name: str, value: Any) -> None:
    default = _DEFAULTS[name]
    numbers = (int, float)
    if name == "frequencies_mhz":
        good = isinstance(value, list) and all(type(v) in numbers and v > 0 for v in value)
    elif isinstance(default, list):
        good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    elif isinstance(default, float):
        good = type(value) in numbers and 0.2 <= value < 1
    else:
        good = type(value) is type(default)
    if not good:
        raise ConfigError(f"{where}: {value!r} is not of the right form (see levers.toml.example)")


def _check_commands(path: Path, values: dict[str, Any]) -> None:
    get, put, gears = (values[f"frequenc{end}"] for end in ("y_get", "y_set", "ies_mhz"))
    if not (get or put or gears):
        return
    if not (get and put and len(gears) > 1 and gears == sorted(set(gears))):
        raise ConfigError(f"{path}: frequency_get goes with frequency_set and two ascending clocks")
    if not all(os.path.isabs(argv[0]) for argv in (get, put)):  # noqa: PTH117 - text from a file
        raise ConfigError(f"{path}: frequency_get, frequency_set: name programs by their full path")
    if not any("{mhz}" in word for word in put[1:]):
        raise ConfigError(f'{path}: frequency_set: has no "{{mhz}}", which stands for the clock')
