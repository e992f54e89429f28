"""The real daemon watched: a worker that hangs, a daemon that stands still, probes under load."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon

pytestmark = pytest.mark.model

PERIOD_S = 2.0  # of the watchdog; fed twice in it


class Manager:
    """systemd's end of the notify socket: what came, and when."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.heard: list[tuple[float, str]] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        for message in iter(lambda: self._sock.recv(4096), b"end"):
            self.heard.append((time.monotonic(), message.decode()))

    def feeds(self, since_s: float) -> list[float]:
        return [at for at, word in self.heard if word == "WATCHDOG=1" and at >= since_s]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", self.address)
        self._thread.join(10)
        self._sock.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Manager]]:
    manager = Manager(tmp_path_factory.mktemp("systemd") / "notify")
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(PERIOD_S * 1e6))}
    running = Daemon(
        "queue.max_requests=400",
        "queue.max_tokens=1000000",
        "engines.restart_backoff_s=0.1",
        environ=environ,
    )
    try:
        yield running.wait_ready(), manager
    finally:
        running.close()
        manager.close()


def until(condition: Callable[[], bool], within_s: float = 90.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert condition()


def post(running: Daemon, tokens: int, stream: bool = False) -> socket.socket:
    """Ask, and do not wait for the answer."""
    body = {"prompt": "Once upon", "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", running.port), 30)
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    return sock


def answers(running: Daemon) -> bool:
    with contextlib.closing(post(running, 4)) as sock:
        sock.settimeout(60)
        return b" 200 " in sock.recv(64)


def audit(running: Daemon) -> Any:
    return running.get("/edged/v1/status")["audit"]


def test_a_hung_worker_does_not_stop_the_watchdog(watched: tuple[Daemon, Manager]) -> None:
    """The worker stands still in mid-answer: systemd is fed all the time, the worker is replaced,
    and the next request is answered."""
    running, manager = watched
    (worker,) = running.workers()
    with contextlib.closing(post(running, 500, stream=True)):
        before = running.steps("decode")
        until(lambda: running.steps("decode") > before + 3)
        since_s = time.monotonic()
        worker.send_signal(signal.SIGSTOP)
        until(lambda: not worker.is_running() or worker.status() == "zombie")
        until(lambda: bool(running.get("/edged/v1/status")["ready"]))
    feeds = manager.feeds(since_s)
    gaps = [b - a for a, b in itertools.pairwise(feeds)]
    assert len(feeds) >= 2
    assert max(gaps) < PERIOD_S * 2
    assert "watchdog_withheld" not in running.log
    assert answers(running)


def test_a_daemon_that_stands_still_does_not_feed(watched: tuple[Daemon, Manager]) -> None:
    """While its loop does not turn systemd hears nothing; when it does again, all is well again."""
    running, manager = watched
    until(lambda: not audit(running))
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    since_s = time.monotonic()
    time.sleep(3 * PERIOD_S)
    assert manager.feeds(since_s) == []
    running.process.send_signal(signal.SIGCONT)
    goes_on_s = time.monotonic()
    until(lambda: len(manager.feeds(goes_on_s)) >= 3)
    assert "loop_blocked" in running.log
    assert running.get("/readyz").startswith("ok; ")
    assert answers(running)


def test_probes_answer_at_once_with_400_requests_in_flight(
    watched: tuple[Daemon, Manager],
) -> None:
    """With 400 requests running and waiting a probe needs a moment, and tells who waits how long;
    when all have left, the sums are right and every slot is free."""
    running, manager = watched
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(contextlib.closing(post(running, 200, stream=True)))
        until(lambda: in_flight(running) >= 390)
        since_s = time.monotonic()
        took: list[float] = []
        for path in ("/livez", "/readyz", "/health") * 20:
            began_s = time.monotonic()
            with urllib.request.urlopen(running.url + path, timeout=30) as answer:
                told = answer.read().decode()
            took.append(time.monotonic() - began_s)
            assert "wait" in told and "progress" in told
            time.sleep(0.1)
        assert in_flight(running) >= 300
        assert audit(running) == []
        print(f"RESULT probe_p50_s={statistics.median(took):.4f} probe_max_s={max(took):.4f}")
        assert statistics.median(took) < 0.5
        assert max(took) < 3.0
    until(lambda: in_flight(running) == 0 and running.slots_busy() == 0)
    time.sleep(4)
    assert audit(running) == []
    assert len(manager.feeds(since_s)) >= 3
    violations = [line for line in running.get("/metrics").splitlines() if "audit_viol" in line]
    assert all(line.endswith(" 0.0") for line in violations if not line.startswith("#"))


def in_flight(running: Daemon) -> int:
    now = running.get("/edged/v1/status", 30)
    return int(now["running"] + now["queue"]["waiting"])
