"""What a worker owes its parent: to die with it, and to be the first to go when memory ends.

Linux only. The parent has already given it a session of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = {"cpu": 500, "npu": 700}  # the daemon's own stays lowest


def obey(engine: str, sock: socket.socket) -> None:
    """Apply the rules of a child. Exits at once when the parent is already gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal means the daemon
    _die_with_parent()
    # The parent may have died before the line above: then its end of the socket is closed.
    if orphaned(sock):
        sys.exit(0)
    os.environ.pop("NOTIFY_SOCKET", None)
    # NumPy's linear algebra is never used here; its idle threads would only cost memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE[engine]), encoding="ascii")
    except OSError as error:
        log(f"cannot raise oom_score_adj: {error.strerror}")
    faulthandler.enable()


def log(line: str) -> None:
    """One plain line for the daemon's log. Never ids or text of a request."""
    print(line, file=sys.stderr, flush=True)


def orphaned(sock: socket.socket) -> bool:
    """True when the other end of the socket is closed and nothing is left to read."""
    readable, _, _ = select.select([sock], [], [], 0)
    if not readable:
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionResetError:
        return True


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log(f"cannot set the parent-death signal: {os.strerror(ctypes.get_errno())}")
