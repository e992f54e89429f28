"""Census: what the kernel says this process has: open files and children. Linux only.

Reads /proc and nothing else; a machine that does not tell gives None, never an error.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from edged.audit import Process

_WORKER = b"edged.worker"


def open_files() -> int | None:
    """Descriptors of this process; with none left to look with, the limit itself."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # but for the one that looks
    except OSError as error:
        if error.errno == errno.EMFILE:
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None


def children(known: frozenset[int], proc: Path = Path("/proc")) -> tuple[Process, ...] | None:
    """Processes the main thread has started. known: workers, so their command is not read."""
    pid = os.getpid()
    try:
        listed = (proc / str(pid) / "task" / str(pid) / "children").read_bytes()
    except OSError:
        return None
    return tuple(found for one in listed.split() if (found := _child(int(one), known, proc)))


def _child(pid: int, known: frozenset[int], proc: Path) -> Process | None:
    """None for one that is gone by now."""
    try:
        # "pid (command) state ...": the command may hold anything, so from its last bracket on.
        zombie = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
        command = b"" if zombie or pid in known else (proc / str(pid) / "cmdline").read_bytes()
    except (OSError, IndexError):
        return None
    return Process(pid, zombie, pid in known or _WORKER in command.split(b"\0"))
