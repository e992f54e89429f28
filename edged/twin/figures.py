"""Figures: what the daemon shows of a simulated board, by metric name. Reads, never commands."""

from __future__ import annotations

import time
from pathlib import Path

from edged.twin import state
from edged.twin.fields import StateError, board_of
from edged.twin.state import TwinState


def board_at(folder: Path, board: str) -> TwinState:
    """The board in `folder`, as hot as it was left; a rested new one where there is none of that
    name. Raises ConfigError for an unknown board."""
    try:
        if board_of(folder) == board:
            return TwinState(folder)
    except (StateError, OSError):
        pass  # none there yet, or not readable: make a new one
    return state.create(folder, board)


def running_board(folder: Path, board: str, pace: float) -> TwinState:
    """board_at, with executes lasting `pace` times what the board would take; 0 = native."""
    twin = board_at(folder, board)
    twin.command(time.monotonic(), {"time_scale": pace})
    return twin


def free_bytes(twin: TwinState) -> int:
    """Device memory that nobody holds; a board without a process holds none."""
    used = twin.get("memory_used_bytes") if twin.get("pid") else 0.0
    return int(twin.board.memory.total_bytes - used)


def figures(twin: TwinState, now_s: float) -> dict[str, float]:
    """Base units; names that end in _total only ever grow. now_s: time.monotonic()."""
    sample = twin.sample(now_s)
    fields = twin.fields()
    return {
        "edged_npu_temperature_celsius": sample.temperature_c,
        "edged_npu_frequency_hertz": sample.clock_mhz * 1e6,
        "edged_npu_power_watts": sample.power_w,
        "edged_npu_memory_used_bytes": fields["memory_used_bytes"],
        "edged_npu_memory_total_bytes": fields["memory_total_bytes"],
        "edged_npu_device_time_seconds_total": fields["device_time_s"],
        "edged_npu_busy_seconds_total": fields["busy_s"],
        "edged_npu_energy_joules_total": fields["busy_joules"],
        "edged_npu_allocations_total": fields["allocations_total"],
        "edged_npu_steps_total": fields["steps_total"],
        "edged_npu_overruns_total": fields["overruns_total"],
    }
