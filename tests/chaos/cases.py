"""What a daemon lives through: all cases by name, and which of them `make test` runs."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable

from chaos import engines, outside
from chaos.lab import Lab

Case = Callable[[Lab, random.Random], Awaitable[None]]

CASES: dict[str, Case] = {
    "worker killed": engines.killed,
    "worker crashed": engines.crashed,
    "worker stopped": engines.stopped,
    "AI Core exception": engines.exception,
    "device lost": engines.device_lost,
    "execute hangs": engines.hung,
    "no memory in one step": engines.no_memory_once,
    "no memory in steps": engines.no_memory_in_steps,
    "no memory at load": engines.no_memory_at_load,
    "no memory in the fallback": engines.no_memory_in_fallback,
    "row not finite": engines.row_not_finite,
    "nothing finite": engines.nothing_finite,
    "both engines dead at once": engines.both_dead_at_once,
    "both engines dead in turn": engines.both_dead_in_turn,
    "broker killed": outside.broker_killed,
    "daemon paused": outside.paused,
    "no files left": outside.no_files_left,
    "clients leave": outside.left,
    "burst": outside.burst,
    "slow readers": outside.slow_readers,
}
LONG: dict[str, Case] = {"ten thousand leave": functools.partial(outside.left, count=10_000)}
SMOKE = (
    *("worker killed", "execute hangs", "device lost", "no memory in steps"),
    *("row not finite", "both engines dead in turn", "broker killed", "clients leave"),
)
