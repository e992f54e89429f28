"""Causes: why a worker died, as the ladder's word for it. Pure."""

from __future__ import annotations

import re

from edged import wire
from edged.ladder import Cause

_KINDS: dict[str, Cause] = {
    "memory": "memory",
    "load": "load",
    "self_test": "self_test",
    "fatal": "fatal",
    "internal": "internal",
}
# The driver or the device does not answer (lost heartbeat, driver, socket, no device): whether it
# ever does again is up to the next start.
_LOST = re.compile(r"failed with (507010|507899|507901|207004)\b")


def cause_of(fault: wire.Fault) -> Cause:
    """What the worker itself said."""
    if fault.kind in ("fatal", "internal") and _LOST.search(fault.detail):
        return "lost"
    return _KINDS.get(fault.kind, "internal")


def cause_of_exit(exit_words: str, kills_before: int | None, kills_now: int | None) -> Cause:
    """What its exit says. kills: processes the kernel had killed for memory; one more, and a
    worker ended by SIGKILL, are one and the same."""
    for_memory = None not in (kills_before, kills_now) and kills_before != kills_now
    return "memory" if for_memory and "SIGKILL" in exit_words else "death"
