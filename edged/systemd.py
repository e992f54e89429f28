"""sd_notify without a dependency: what the daemon tells its service manager.

Owns the datagram format of sd_notify(3) and the variables of sd_watchdog_enabled(3).
Never raises after construction (a manager that went away must not stop the daemon), never
waits, and never decides when the daemon is ready or alive: the caller does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, MutableMapping

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
MAX_STATUS_CHARS = 512


class Notifier:
    """Messages to the service manager; every method is a no-op without one.

    Each returns True when the manager's socket took the message. False needs no handling:
    readiness is repeated by nobody, so send it again only if you have reason to.
    """

    def __init__(self, address: str = "", watchdog_interval_s: float | None = None) -> None:
        self.address = address
        self.watchdog_interval_s = watchdog_interval_s
        # Kept for the life of the process: one that has no descriptor left is still alive.
        self._file: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Read NOTIFY_SOCKET and the watchdog's period; bad values switch that part off."""
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_interval_s(environ, os.getpid()))

    def ready(self) -> bool:
        return self._send("READY=1")

    def status(self, text: str) -> bool:
        """One line for `systemctl status`; line breaks become spaces, long text is cut."""
        return self._send(f"STATUS={' '.join(text.split())[:MAX_STATUS_CHARS]}")

    def watchdog(self) -> bool:
        """Proof of life; due every `watchdog_interval_s`, from the code that is alive."""
        return self._send("WATCHDOG=1")

    def reloading(self) -> bool:
        """Follow it with ready(). Type=notify-reload refuses it without the time stamp."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> bool:
        return self._send("STOPPING=1")

    def extend(self, seconds: float) -> bool:
        """Ask for `seconds` more, counted from now, in whatever phase (start, stop) this is."""
        return self._send(f"EXTEND_TIMEOUT_USEC={max(0, int(seconds * 1_000_000))}")

    def _send(self, message: str) -> bool:
        if not self.address.startswith(("/", "@")):
            return False  # none, or a transport (vsock) we do not speak
        address = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        try:
            if self._file is None:
                self._file = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()
            sock = socket.socket(fileno=self._file)
            try:
                sock.setblocking(False)
                sock.sendto(message.encode("utf-8", "replace"), address)
            finally:
                sock.detach()
        except (OSError, ValueError):  # gone, full, path too long, NUL in the path
            return False
        return True


def forget(environ: MutableMapping[str, str]) -> None:
    """Remove the protocol's variables, so that no child can speak in our name."""
    for name in VARIABLES:
        environ.pop(name, None)


def watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Half of WATCHDOG_USEC when the watchdog is meant for this process, else None."""
    try:
        period_us = int(environ.get("WATCHDOG_USEC", ""))
        meant_for = int(environ.get("WATCHDOG_PID", pid))
    except ValueError:
        return None
    if period_us <= 0 or meant_for != pid:
        return None
    return period_us / 2 / 1_000_000
