"""Lines of text that say which levers this board really has, for a command line.

Moves every candidate and puts it back, so it is refused while a daemon holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edged import settings
from edged.guard.levers import Lever
from edged.guard.levers.find import Found, find_levers


async def check(
    settings: settings.Levers, extra: Sequence[Lever] = (), state_dir: Path | None = None
) -> list[str]:
    """Finds, proves, restores; never raises LeverError."""
    found = await find_levers(settings, extra, state_dir)
    said = lines(found)
    for lever in (found.frequency, found.fan):
        if lever is not None:
            await lever.stop()
    return said


def lines(found: Found) -> list[str]:
    """One per candidate, then one per kind of lever that is missing."""
    said = [f"{trial.kind}: {trial.name}: {_verdict(trial.why)}" for trial in found.trials]
    for lever in (found.frequency, found.fan):
        if lever is not None:
            said.append(f"{lever.kind}: {lever.name} is used, {_range(lever)}")
    said += found.notes
    return [*said, "batch, duty, admission: always"]


def _verdict(why: str) -> str:
    return f"not counted: {why}" if why else "live, proven by reading back"


def _range(lever: Lever) -> str:
    if lever.kind == "fan":
        return f"{lever.values[0]:.0%} to {lever.values[-1]:.0%}"
    return ", ".join(f"{mhz:g}" for mhz in lever.values) + " MHz"
