"""Logs: one pipeline, two formats, and never a reason for the daemon to stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from edged import logs


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Other tests find logging as it was."""
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = (root.level, access.level)
    yield
    for handler in [h for h in root.handlers if isinstance(h, logs.Handler)]:
        root.removeHandler(handler)
    root.level, access.level = before
    structlog.reset_defaults()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end)."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def lines(read_end: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(read_end, 1 << 20).splitlines()]


def test_off_a_terminal_every_line_is_a_json_object(pipe: tuple[int, int]) -> None:
    """structlog's and the standard library's records come out alike, as JSON lines."""
    logs.configure("info", "auto", pipe[1])
    structlog.get_logger("edged.app").info("ready", port=8090, reason="two\nlines", path=Path("/x"))
    logging.getLogger("aiomqtt").warning("lost %s", "broker")

    ours, theirs = lines(pipe[0])

    assert (ours["event"], ours["level"], ours["port"]) == ("ready", "info", 8090)
    assert ours["reason"] == "two\nlines"
    assert ours["logger"] == "edged.app"
    assert list(ours)[:3] == ["timestamp", "level", "event"]
    assert (theirs["event"], theirs["level"], theirs["logger"]) == (
        "lost broker",
        "warning",
        "aiomqtt",
    )
    assert ours.keys() >= {"timestamp"} and theirs.keys() >= {"timestamp"}


def test_exceptions_are_one_text_field_without_variables(pipe: tuple[int, int]) -> None:
    """A traceback is the field `exception` of its line; values of variables never appear."""
    logs.configure("info", "json", pipe[1])
    prompt = "the user's " + "secret"
    try:
        raise ValueError(f"length {len(prompt)}")
    except ValueError:
        structlog.get_logger().exception("ours")
        logging.getLogger("asyncio").exception("theirs")

    for line in lines(pipe[0]):
        assert "ValueError: length 17" in line["exception"]
        assert "Traceback" in line["exception"]
        assert "user's secret" not in json.dumps(line)


def test_the_level_holds_for_both_worlds(pipe: tuple[int, int]) -> None:
    """Records below the level are dropped; aiohttp's access log is off in any case."""
    logs.configure("warning", "json", pipe[1])
    structlog.get_logger().info("no")
    logging.getLogger("paho").info("no")
    logs.configure("info", "json", pipe[1])
    logging.getLogger("aiohttp.access").info("no")
    structlog.get_logger().info("yes")

    assert [line["event"] for line in lines(pipe[0])] == ["yes"]


def test_a_terminal_gets_readable_lines() -> None:
    """On a TTY a line is for people, and values cannot send escape codes to it."""
    master, slave = pty.openpty()
    try:
        logs.configure("info", "auto", slave)
        structlog.get_logger().info("ready", client="evil\x1b[2J")
        shown = os.read(master, 4096).decode()
    finally:
        os.close(master)
        os.close(slave)

    assert "ready" in shown
    assert not shown.startswith("{")
    assert "\x1b[2J" not in shown


def test_a_closed_pipe_is_no_error(pipe: tuple[int, int]) -> None:
    """Logging goes on without an error when nobody holds the other end any more."""
    logs.configure("info", "json", pipe[1])
    os.close(pipe[0])

    structlog.get_logger().info("into the void")
    logging.getLogger("x").error("into the void")


def test_a_full_disk_is_no_error() -> None:
    """ENOSPC costs the line only."""
    with Path("/dev/full").open("wb") as full:
        logs.configure("info", "json", full.fileno())
        structlog.get_logger().info("nowhere to go")


def test_a_closed_descriptor_is_no_error(pipe: tuple[int, int]) -> None:
    """EBADF costs the line only."""
    logs.configure("info", "json", pipe[1])
    os.close(pipe[1])

    structlog.get_logger().info("nowhere to go")


def test_a_reader_that_sleeps_cannot_block_the_daemon(pipe: tuple[int, int]) -> None:
    """A full pipe loses lines instead of waiting; the loss is told once the reader is back."""
    logs.configure("info", "json", pipe[1])
    log = structlog.get_logger()
    done = threading.Event()

    def flood() -> None:
        for number in range(300):
            log.info("line", number=number, filling="x" * 1000)
        done.set()

    threading.Thread(target=flood, daemon=True).start()
    assert done.wait(60)
    before = os.read(pipe[0], 1 << 20).splitlines()
    log.info("after")
    note, after = os.read(pipe[0], 1 << 20).splitlines()[-2:]

    assert 0 < len(before) < 300
    assert "log lines were lost" in json.loads(note)["event"]
    assert json.loads(note)["level"] == "warning"
    assert json.loads(after)["event"] == "after"


def test_a_line_larger_than_the_pipe_is_cut_and_the_next_is_whole(pipe: tuple[int, int]) -> None:
    """A torn line never swallows the line that follows it."""
    logs.configure("info", "json", pipe[1])
    log = structlog.get_logger()
    log.info("huge", filling="x" * (1 << 20))
    os.read(pipe[0], 1 << 20)
    log.info("next")

    last = os.read(pipe[0], 1 << 20).splitlines()[-1]

    assert json.loads(last)["event"] == "next"


def test_a_huge_line_to_a_slow_reader_waits_only_a_moment(pipe: tuple[int, int]) -> None:
    """The patience is for the line as a whole, not for each piece of it."""
    logs.configure("info", "json", pipe[1])
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.02):
            os.read(pipe[0], 4096)

    reader = threading.Thread(target=sip)
    reader.start()
    began = time.monotonic()
    structlog.get_logger().info("huge", filling="x" * (8 << 20))  # 40 s of sips
    took_s = time.monotonic() - began
    stop.set()
    structlog.get_logger().info("a last sip, should the reader wait for one")
    reader.join()

    assert took_s < 15


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_record_that_cannot_be_rendered_is_replaced(pipe: tuple[int, int]) -> None:
    """Wrong arguments and broken reprs end as a warning that says where, not as an exception."""
    logs.configure("info", "json", pipe[1])
    root = logging.getLogger()
    root.handlers[:] = [h for h in root.handlers if isinstance(h, logs.Handler)]  # not pytest's
    logging.getLogger("x").warning("%d apples", "many")
    structlog.get_logger().info("bad value", value=Unprintable())
    structlog.get_logger().info("lone surrogate \udc80")

    first, second, third = lines(pipe[0])

    assert "could not be rendered" in first["event"]
    assert "could not be rendered" in second["event"]
    assert third["event"].startswith("lone surrogate")


def test_a_process_whose_log_reader_dies_still_ends_well() -> None:
    """The daemon's exit status does not depend on its log: `edged run 2>&1 | head` may end."""
    code = """
import sys, structlog
from edged import logs
logs.configure("info", "json")
print("up", flush=True)
sys.stdin.read()
structlog.get_logger().info("after the reader has gone")
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin and child.stdout and child.stderr
    assert child.stdout.readline() == b"up\n"
    child.stderr.close()
    child.stdin.close()
    status = child.wait(60)
    child.stdout.close()
    assert status == 0


def test_connections_that_find_no_file_cost_one_line_in_a_while(pipe: tuple[int, int]) -> None:
    """asyncio says it a hundred times a second, with tracebacks; the log says it once, and what
    to do. Its other words are as ever."""
    logs.configure("info", "json", pipe[1])
    for _ in range(100):
        logging.getLogger("asyncio").error(
            "socket.accept() out of system resource\nsocket: %s", 8, exc_info=OSError(24, "x")
        )
    logging.getLogger("asyncio").error("something else")
    told = lines(pipe[0])
    assert len(told) == 2, told
    assert "LimitNOFILE" in told[0]["event"]
    assert "exception" not in told[0]
    assert told[1]["event"] == "something else"
