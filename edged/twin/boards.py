"""Boards: parameter files -> `physics.Board`. Never invents a number.

A board is named ("field", "310b4") or given as the path of a TOML file of the same form.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from edged.errors import ConfigError
from edged.twin import tables
from edged.twin.physics import Board

BOARDS_DIR = Path(__file__).parents[2] / "configs" / "boards"
INSTALLED_DIR = Path("/usr/share/edged/boards")  # where a package without the checkout puts them


def folder() -> Path:
    return BOARDS_DIR if BOARDS_DIR.is_dir() else INSTALLED_DIR


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def load(name: str) -> Board:
    """Raises ConfigError naming the board, the file or the key, and what would be valid."""
    if name.endswith(".toml"):
        path = Path(name)
    else:
        path = folder() / f"{name.lower()}.toml"
        if not path.is_file():
            known = names()
            close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
            raise ConfigError(f"unknown board {name!r}; {hint} (a path ending in .toml works too)")
    return checked(tables.read(path, Board), str(path))


def checked(board: Board, where: str) -> Board:
    """What types cannot say: order and range of the numbers."""
    gears = board.clock.gears_mhz
    duties = [duty for duty, _ in board.fan.points]
    problems = {
        "clock.gears_mhz: ascending, positive clocks, at least one": not gears
        or gears[0] <= 0
        or list(gears) != sorted(set(gears)),
        "thermal.terms: at least one pair of positive (C/W, s)": not board.thermal.terms
        or any(r <= 0 or tau <= 0 for r, tau in board.thermal.terms),
        "fan.points: ascending duties from 0 to 1, at least one": not duties
        or duties != sorted(set(duties))
        or not 0 <= duties[0] <= duties[-1] <= 1,
        "firmware: release_c < throttle_c < reset_c": not board.firmware.release_c
        < board.firmware.throttle_c
        < board.firmware.reset_c,
        "memory.bandwidth_bytes_per_s, memory.efficiency: positive": not (
            board.memory.bandwidth_bytes_per_s > 0 and 0 < board.memory.efficiency <= 1
        ),
        "compute: positive peak_flops and efficiencies": min(
            board.compute.peak_flops,
            board.compute.decode_efficiency,
            board.compute.prefill_efficiency,
        )
        <= 0,
    }
    for rule, broken in problems.items():
        if broken:
            raise ConfigError(f"{where}: {rule}")
    return board
