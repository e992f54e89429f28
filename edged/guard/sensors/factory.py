"""Factory: which sources the settings name, or which exist here. Looks for files, reads none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edged.guard.sensors import Sensor, places
from edged.guard.sensors.command import CommandSensor
from edged.guard.sensors.helped import HelpedSensor
from edged.guard.sensors.hub import Hub
from edged.guard.sensors.linux import choose, zones
from edged.guard.sensors.npu_smi import NpuSmi
from edged.settings import SensorName, Sensors

# What was configured by hand is trusted most, then what asks the driver most directly.
ORDER: tuple[SensorName, ...] = ("command", "dcmi", "npu-smi", "linux")


def make_hub(settings: Sensors, extra: Sequence[Sensor] = ()) -> Hub:
    """extra: trusted before all others."""
    return Hub([*extra, *(make(name, settings) for name in wanted(settings))], settings)


def wanted(settings: Sensors) -> tuple[SensorName, ...]:
    """Sources named explicitly are made even where they are missing, so that status says so."""
    if settings.sources != ("auto",):
        return settings.sources
    return tuple(name for name in ORDER if place(name, settings) is not None)


def place(name: SensorName, settings: Sensors) -> str | None:
    """Where the source is on this machine, in words; None = it is not."""
    if name == "command":
        return " ".join(settings.command) or None
    if name == "dcmi":
        return places.dcmi_library(settings.dcmi_library)
    if name == "npu-smi":
        return places.npu_smi(settings.npu_smi)
    zone = choose(zones(Path(settings.linux_root)), settings.linux_name)
    return None if zone is None else f"{zone.value} ({zone.name})"


def make(name: SensorName, settings: Sensors) -> Sensor:
    timeout_s = settings.timeout_s
    if name == "command":
        return CommandSensor(settings.command, timeout_s)
    if name == "dcmi":
        library = places.dcmi_library(settings.dcmi_library) or settings.dcmi_library
        arguments = ("dcmi", library or "libdcmi.so", str(settings.chip))
        return HelpedSensor("dcmi", arguments, timeout_s)
    if name == "npu-smi":
        path = places.npu_smi(settings.npu_smi) or settings.npu_smi or "npu-smi"
        return NpuSmi(path, settings.chip, timeout_s)
    return HelpedSensor("linux", ("linux", settings.linux_root, settings.linux_name), timeout_s)
