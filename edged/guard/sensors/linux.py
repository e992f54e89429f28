"""Linux: temperatures that the kernel shows in sysfs as thermal zones and hwmon chips.

Reading one may block in a dead bus driver, so this runs in a child process only. What psutil
shows comes from the same files, with a fixed root. Standard library only.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from edged.guard.sensors import Raw, SensorError, printable

# The first pattern that any name matches decides; a host CPU's own zone is none of these.
_NAMES = (
    re.compile(r"npu|ascend|davinci|ai_?core", re.IGNORECASE),
    re.compile(r"soc(?!ket)|cluster|\bdie", re.IGNORECASE),
)
_MOST_CHARS = 64  # of a sysfs value
_DEGREES_BELOW = 150.0  # a driver that forgets the kernel's thousandths


@dataclass(frozen=True)
class Zone:
    """critical: file with the temperature at which the kernel shuts down, where there is one."""

    name: str
    value: Path
    critical: Path | None = None


def zones(root: Path) -> list[Zone]:
    """All temperatures the kernel shows, thermal zones first; reads names alone."""
    found = []
    for folder in _numbered(root / "class" / "thermal", "thermal_zone*"):
        name = _text(folder / "type") or folder.name
        trips = [t for t in _numbered(folder, "trip_point_*_type") if _text(t) == "critical"]
        critical = trips[0].with_name(trips[0].name.replace("_type", "_temp")) if trips else None
        found.append(Zone(name, folder / "temp", critical))
    for folder in _numbered(root / "class" / "hwmon", "hwmon*"):
        chip = _text(folder / "name") or folder.name
        for value in _numbered(folder, "temp*_input"):
            label = _text(value.with_name(value.name.replace("_input", "_label")))
            critical = value.with_name(value.name.replace("_input", "_crit"))
            found.append(Zone(f"{chip} {label}".strip(), value, critical))
    return found


def choose(found: list[Zone], name: str) -> Zone | None:
    """The one of that name, or where none is asked for, one that tells of an NPU or SoC."""
    if name:
        return next((zone for zone in found if zone.name == name), None) or next(
            (zone for zone in found if name in zone.name.split()), None
        )
    matches = (zone for pattern in _NAMES for zone in found if pattern.search(zone.name))
    return next(matches, None)


def read(root: str, name: str) -> Raw:
    """Raises SensorError. name: as the kernel has it; "" = choose."""
    found = zones(Path(root))
    zone = choose(found, name)
    if zone is None:
        known = ", ".join(sorted({printable(z.name, 40) for z in found})[:12]) or "none"
        wanted = f"is called {name!r}" if name else "tells of an NPU or SoC"
        raise SensorError(f"no temperature in {root} {wanted}; set sensors.linux_name to: {known}")
    try:
        celsius = _celsius(zone.value)
    except OSError as error:
        raise SensorError(f"cannot read {zone.value}: {error.strerror}") from None
    except ValueError:
        raise SensorError(f"{zone.value} holds no number; choose another by linux_name") from None
    reset_c = None
    if zone.critical is not None:
        with contextlib.suppress(OSError, ValueError):  # an extra
            reset_c = _celsius(zone.critical)
    return Raw(temperature_c=celsius, reset_c=reset_c)


def _celsius(path: Path) -> float:
    """The kernel's thousandths of a degree; a small number can only be whole degrees."""
    with path.open(encoding="ascii", errors="replace") as file:
        value = float(int(file.read(_MOST_CHARS)))
    return value if abs(value) < _DEGREES_BELOW else value / 1000


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARS).strip()
    except OSError:
        return ""


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Matches in the order of their numbers, zone2 before zone10."""

    def number(path: Path) -> tuple[int, str]:
        digits = re.search(r"\d{1,9}", path.name)
        return (int(digits[0]) if digits else 0, path.name)

    return sorted(folder.glob(pattern), key=number)
