"""Which levers this board really has: candidates in order of trust, each proven by moving it.

A lever that cannot be moved and read back is not counted, and the reason is told; nothing here
raises. Moves each candidate to two places and back, a second or so in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edged import settings
from edged.guard.levers import Kind, Lever, LeverError
from edged.guard.levers.client import HelperLink
from edged.guard.levers.knobs import CommandClock, proves
from edged.guard.levers.local import LocalLever
from edged.guard.levers.saved import Saved
from edged.machine import default_state_dir

_WITHOUT: dict[Kind, str] = {
    "frequency": "frequency: not controllable here, holding the limit with batch and duty",
    "fan": "fan: not controllable here, it stays as the board runs it",
}


@dataclass(frozen=True)
class Trial:
    """One candidate and what came of it; why is empty when it is live."""

    name: str
    kind: Kind
    why: str = ""


@dataclass(frozen=True)
class Found:
    """frequency, fan: the live ones. notes: what is missing, for status. trials: all candidates."""

    frequency: Lever | None = None
    fan: Lever | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()


async def find_levers(
    settings: settings.Levers, extra: Sequence[Lever] = (), state_dir: Path | None = None
) -> Found:
    """extra: levers the caller brings, tried first (the simulated board's, say).

    state_dir: where a command's original clock is kept; default the daemon's. The caller stops
    the levers it gets; the others are let go here. Never raises LeverError.
    """
    live: dict[Kind, Lever] = {}
    trials: list[Trial] = []
    reasons: list[str] = []
    candidates = [*extra]
    used: tuple[Lever, ...] = ()
    link = HelperLink(settings.helper_socket)
    try:
        candidates += await _command(settings, state_dir, reasons)
        candidates += await _helper(link, reasons)
        for lever in candidates:
            why = await proven(lever) if lever.kind not in live else "another one is used"
            trials.append(Trial(lever.name, lever.kind, why))
            if not why:
                live[lever.kind] = lever
        used = tuple(live.values())
    finally:  # cancelled, too: nothing stays where a trial put it
        for lever in candidates:
            if lever not in used:
                await lever.stop()
        if not link.users:
            link.close()
    notes = tuple(_missing(kind, trials, reasons) for kind in _WITHOUT if kind not in live)
    return Found(live.get("frequency"), live.get("fan"), notes, tuple(trials))


async def proven(lever: Lever) -> str:
    """Why the lever does not count; "" when two places could be set and read back.

    The cooler comes last: whoever is killed in between leaves a cool board. A fan goes half the
    way only, for the sake of whoever sleeps beside it.
    """
    low, high = lever.values[0], lever.values[-1]
    if low == high:
        return "has one place only"
    places = (high, low) if lever.kind == "frequency" else (low, (low + high) / 2)
    try:
        for value in places:
            found = await lever.set(value)
            if not proves(lever.kind, lever.values, value, found):
                return f"was set to {value:g} but reads {found:g}"
        await lever.restore()
    except LeverError as error:
        return str(error)
    return ""


async def _command(
    settings: settings.Levers, state_dir: Path | None, reasons: list[str]
) -> list[LocalLever]:
    if not settings.frequency_get:
        return []
    knob = CommandClock(
        "command/clock",
        settings.frequency_get,
        settings.frequency_set,
        settings.frequencies_mhz,
        settings.timeout_s,
    )
    lever = LocalLever(knob, Saved((state_dir or default_state_dir()) / "levers.json"))
    try:
        await lever.hold()
    except LeverError as error:
        reasons.append(f"frequency: {knob.name}: {error}")
        return []
    return [lever]


async def _helper(link: HelperLink, reasons: list[str]) -> list[Lever]:
    if not link.path:
        return []
    try:
        found, notes = await link.levers()
    except LeverError as error:
        reasons.append(str(error))
        return []
    link.users.update(lever.name for lever in found)
    reasons += notes
    return list(found)


def _missing(kind: Kind, trials: Sequence[Trial], reasons: Sequence[str]) -> str:
    why = [f"{trial.name}: {trial.why}" for trial in trials if trial.kind == kind]
    others = [other for other in _WITHOUT if other != kind]
    for reason in reasons:
        about, _, rest = reason.partition(": ")
        if about == kind:
            why.append(rest)
        elif about not in others:
            why.append(reason)
    return _WITHOUT[kind] + (f" ({'; '.join(why)})" if why else "")
