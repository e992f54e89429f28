"""What edged tells systemd, received on a real datagram socket."""

from __future__ import annotations

import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edged import systemd
from edged.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock


@pytest.fixture
def notifier(manager: socket.socket) -> Notifier:
    return Notifier.from_environ({"NOTIFY_SOCKET": manager.getsockname()})


def received(manager: socket.socket) -> str:
    return manager.recv(4096).decode()


def test_each_state_arrives_as_one_datagram(manager: socket.socket, notifier: Notifier) -> None:
    """Every message of the protocol reaches the manager word for word."""
    assert notifier.ready()
    assert received(manager) == "READY=1"
    assert notifier.watchdog()
    assert received(manager) == "WATCHDOG=1"
    assert notifier.stopping()
    assert received(manager) == "STOPPING=1"
    assert notifier.extend(2.5)
    assert received(manager) == "EXTEND_TIMEOUT_USEC=2500000"


def test_status_cannot_smuggle_a_second_assignment(
    manager: socket.socket, notifier: Notifier
) -> None:
    """A status text with line breaks, lone surrogates or great length stays one STATUS line."""
    notifier.status("loading\nREADY=1 \udc80 " + "x" * 5000)
    message = received(manager)
    assert message.startswith("STATUS=loading READY=1 ? x")
    assert "\n" not in message
    assert len(message) <= len("STATUS=") + systemd.MAX_STATUS_CHARS


def test_reloading_carries_the_monotonic_time(manager: socket.socket, notifier: Notifier) -> None:
    """RELOADING and its CLOCK_MONOTONIC stamp travel in the same datagram."""
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", received(manager))
    assert match is not None
    assert before_us <= int(match[1]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_abstract_sockets_work() -> None:
    """An address that starts with @ is a socket without a file."""
    name = f"edged-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(10)
        assert Notifier("@" + name).ready()
        assert sock.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:1234", "/nowhere/notify", "/" + "x" * 200, "/a\0b"]
)
def test_no_manager_is_no_error(address: str) -> None:
    """Without a usable NOTIFY_SOCKET every message is quietly not sent."""
    assert not Notifier.from_environ({"NOTIFY_SOCKET": address}).ready()


def test_a_manager_that_goes_away_or_stops_reading_never_hurts(tmp_path: Path) -> None:
    """A full or closed socket costs the message, not the daemon: no error and no wait."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        notifier = Notifier(path)
        taken = 0
        while notifier.watchdog():  # ends only because a full queue is refused at once
            taken += 1
        assert taken > 0
    assert not notifier.watchdog()


def test_a_process_without_a_descriptor_left_is_still_alive(
    manager: socket.socket, notifier: Notifier
) -> None:
    """At the limit of open files the watchdog is fed as before."""
    notifier.status("started")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        assert notifier.watchdog()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [received(manager), received(manager)] == ["STATUS=started", "WATCHDOG=1"]


def test_watchdog_is_fed_twice_per_period() -> None:
    """The interval is half of WATCHDOG_USEC."""
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier.from_environ(mine).watchdog_interval_s == 15.0
    assert systemd.watchdog_interval_s({"WATCHDOG_USEC": "500000"}, 7) == 0.25


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0", "WATCHDOG_PID": "7"},
        {"WATCHDOG_USEC": "-5", "WATCHDOG_PID": "7"},
        {"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "7"},
        {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "me"},
    ],
)
def test_a_watchdog_meant_for_another_process_is_left_alone(environ: dict[str, str]) -> None:
    """No interval without a period, with a foreign pid or with a value that is no number."""
    assert systemd.watchdog_interval_s(environ, 7) is None


def test_children_never_see_the_protocol(manager: socket.socket) -> None:
    """After forget() a child process has none of the variables, and the notifier still works."""
    code = """
import os, subprocess, sys
from edged import systemd
notifier = systemd.Notifier.from_environ(os.environ)
systemd.forget(os.environ)
child = "import os; print(sum(n in os.environ for n in %r))" % (systemd.VARIABLES,)
seen = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
notifier.status("child sees " + seen)
"""
    environ = {**os.environ, "NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "1000000"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)
    assert received(manager) == "STATUS=child sees 0"
