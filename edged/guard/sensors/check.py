"""Check: one line per source, whether it is here and what it gave. For a person at a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edged.guard.plausible import Filter, believed
from edged.guard.sensors import Raw, Sensor, SensorError, tidied
from edged.guard.sensors.factory import ORDER, make, place, wanted
from edged.settings import Sensors

_NOT_HERE = {
    "command": "not configured (sensors.command)",
    "dcmi": "no libdcmi.so here (sensors.dcmi_library)",
    "npu-smi": "no npu-smi here (sensors.npu_smi)",
    "linux": "no thermal zone that tells of an NPU or SoC (sensors.linux_name)",
}


async def lines(settings: Sensors, extra: Sequence[Sensor] = ()) -> list[str]:
    """Reads each source once, side by side, and stops it; as long as the slowest one's time-out."""
    used = wanted(settings)
    here = {name: place(name, settings) for name in ORDER}
    asked = [*extra, *(make(name, settings) for name in ORDER if here[name] is not None)]
    outcomes = await asyncio.gather(*(_once(sensor) for sensor in asked))
    told = {sensor.name: outcome for sensor, outcome in zip(asked, outcomes, strict=True)}
    found = [line(sensor.name, "", told[sensor.name], used=True) for sensor in extra]
    for name in (*used, *(name for name in ORDER if name not in used)):
        outcome = told.get(name, SensorError(_NOT_HERE.get(name, "not here")))
        found.append(line(name, here[name] or "", outcome, used=name in used))
    return found


def line(name: str, where: str, outcome: Raw | SensorError, used: bool) -> str:
    """Such as "npu-smi   65 °C, Alarm, 3628 of 15609 MiB  [/usr/local/sbin/npu-smi]"."""
    words = str(outcome) if isinstance(outcome, SensorError) else in_words(outcome)
    end = f"  [{where}]" if where else ""
    return f"{name:<9} {words}{end}" + ("" if used else "  (not used)")


def in_words(raw: Raw) -> str:
    """The figures it has, with units."""
    _, _, problem = believed(Filter(), raw.temperature_c)
    words = [problem or f"{raw.temperature_c:g} °C"]
    if raw.frequency_mhz is not None:
        words.append(f"{raw.frequency_mhz:g} MHz")
    if raw.power_w is not None:
        words.append(f"{raw.power_w:g} W")
    if raw.utilization_ratio is not None:
        words.append(f"{raw.utilization_ratio:.0%} busy")
    if raw.memory_used_bytes is not None and raw.memory_total_bytes is not None:
        words.append(f"{raw.memory_used_bytes >> 20} of {raw.memory_total_bytes >> 20} MiB")
    if raw.throttle_c is not None:
        words.append(f"throttles at {raw.throttle_c:g} °C")
    if raw.reset_c is not None:
        words.append(f"resets at {raw.reset_c:g} °C")
    if raw.health is not None:
        normal = " (normal on some boards)" if raw.health.lower() == "alarm" else ""
        words.append(f"health {raw.health}{normal}")
    return ", ".join(words)


async def _once(sensor: Sensor) -> Raw | SensorError:
    try:
        return tidied(await sensor.read())
    except SensorError as error:
        return error
    finally:
        await sensor.stop()
