"""The watchdog: fed while all that was begun has an owner, withheld when the daemon is stuck."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import request
from fakes_audit import AuditBench
from test_engine import SCRIPT, engine, until
from test_scheduler import virtual

from edged import wire
from edged.audit_facts import of_worker
from edged.core import Limits
from edged.engine.life import Means
from edged.engine.rungs import Rung
from edged.engine.worker_engine import WorkerEngine
from edged.ladder import Rules
from edged.status import Status
from edged.systemd import Notifier
from edged.watch import AUDIT_WITHIN_S, Watch, watching, why_withheld

STATUS = Status("n", "1", "normal", "all engines are ready", True)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def said(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def fed(manager: socket.socket) -> int:
    return said(manager).count("WATCHDOG=1")


@pytest.mark.parametrize(
    ("late_s", "missed", "why"),
    [
        (AUDIT_WITHIN_S, (), ""),
        (AUDIT_WITHIN_S + 0.5, (), "the audit has not run for 5.5 s"),
        (0.0, ("npu: load: nobody is to act on it",), "npu: load: nobody is to act on it"),
    ],
)
def test_only_a_late_audit_or_a_missed_obligation_withholds(
    late_s: float, missed: tuple[str, ...], why: str
) -> None:
    """The one decision: what was audited in time and has owners is alive."""
    assert why_withheld(100.0 + late_s, 100.0, missed) == why


def test_a_watchdog_is_fed_as_long_as_the_loop_turns(manager: socket.socket) -> None:
    """Fed at half of systemd's period; a part that did not audit in time withholds it."""
    notifier = Notifier(manager.getsockname(), watchdog_interval_s=2.0)

    @virtual
    async def lives() -> None:
        bench = AuditBench()
        async with watching(bench.watch, notifier, lambda: STATUS):
            await asyncio.sleep(7.5)
            assert fed(manager) == 4
            bench.watch.look = hang  # type: ignore[method-assign]
            await asyncio.sleep(AUDIT_WITHIN_S + 2)
            said(manager)  # the socket holds ten messages
            assert "the audit has not run" in bench.watch.withheld()
            await asyncio.sleep(20)
            assert fed(manager) == 0

    lives()


def hang() -> None:
    """An audit that does not audit."""


def test_a_hand_over_that_nobody_makes_withholds(manager: socket.socket) -> None:
    """A stream that lost its engine and could go on with the next one, but does not, is told as
    stuck; when it goes on, the watchdog is fed again."""
    notifier = Notifier(manager.getsockname(), watchdog_interval_s=1.0)

    @virtual
    async def lives() -> None:
        bench = AuditBench(slots=1, spares=1)
        stream = bench.scheduler.submit(request("moved", max_tokens=900))
        await asyncio.sleep(0.5)
        dispatch, bench.scheduler.dispatch = bench.scheduler.dispatch, hang  # type: ignore
        bench.engine.die(down_s=10_000)
        async with watching(bench.watch, notifier, lambda: STATUS):
            await asyncio.sleep(6)
            assert "hand-over of stream moved: an engine has a slot" in bench.watch.withheld()
            said(manager)
            await asyncio.sleep(5)
            assert fed(manager) == 0
            dispatch()
            await asyncio.sleep(3)
            assert stream.engine == "spare0"
            assert bench.watch.withheld() == ""
            assert fed(manager) >= 2

    lives()


@virtual
async def test_a_request_past_its_deadline_that_nobody_ended_withholds() -> None:
    """The deadline of a request is an obligation, too."""
    bench = AuditBench()
    deadline_s = asyncio.get_running_loop().time() + 3
    stream = bench.scheduler.submit(request("late", max_tokens=900, deadline_s=deadline_s))
    assert stream.expiry is not None
    stream.expiry.cancel()  # the timer is lost
    for _ in range(9):
        await asyncio.sleep(1)
        bench.watch.look()
    assert "deadline of stream late: due" in bench.watch.withheld()


@virtual
async def test_an_engine_that_nobody_keeps_alive_withholds() -> None:
    """When the task that starts the next worker is gone, nobody else will."""
    bench = AuditBench()
    bench.engine.keeper.lost = True
    for _ in range(3):
        await asyncio.sleep(1)
        bench.watch.look()
    assert bench.watch.withheld() == "fake: its next worker: nobody is to act on it"


@virtual
async def test_a_restart_that_is_overdue_withholds() -> None:
    """A worker that should have been started and was not is an obligation nobody acted upon."""
    bench = AuditBench()
    bench.engine.keeper.kept = True
    bench.engine.keeper.due_s = asyncio.get_running_loop().time() + 5
    for second in range(12):
        await asyncio.sleep(1)
        bench.watch.look()
        assert (second < 9) == (bench.watch.withheld() == "")
    assert "fake: start: due" in bench.watch.withheld()


@virtual
async def test_a_guard_that_stands_still_withholds() -> None:
    """Nobody looks after the chip's heat any more: that is worth a restart of the daemon."""
    bench = AuditBench()
    round_s = asyncio.get_running_loop().time()
    sources = dataclasses.replace(bench.sources(int, int), guarded_s=lambda: round_s)
    watch = Watch(sources, bench.metrics)
    for second in range(130):
        await asyncio.sleep(1)
        watch.look()
        assert second > 120 or watch.withheld() == ""
    assert "the guard's round: due" in watch.withheld()


# --- real workers that hang -----------------------------------------------------------------------


def owned(cpu: WorkerEngine) -> bool:
    return all(one.owned for one in of_worker(cpu))


async def test_a_worker_that_hangs_is_the_ladders_business() -> None:
    """From its stop to its replacement there is always somebody who is to act, and by when."""
    async with engine() as cpu:
        await cpu.start()
        first = cpu.pid
        assert first is not None
        cpu.run(request(max_tokens=10_000), ())
        await until(lambda: cpu.keeper.life is not None and cpu.free_slots is not None)
        os.kill(first, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 20
        while (cpu.pid == first or cpu.health().state != "ready") and loop.time() < end_s:
            assert owned(cpu)
            overdue = [o for o in of_worker(cpu) if o.due_s and loop.time() - o.due_s > 2]
            assert not overdue
            await asyncio.sleep(0.02)
        assert cpu.pid != first
        assert cpu.health().state == "ready"


async def test_a_load_has_a_deadline() -> None:
    """A worker that hangs while it loads has an owner at every moment until it is replaced."""
    cpu = WorkerEngine(
        "cpu",
        "scripted",
        [Rung("2 slots", wire.Launch("cpu", "/nowhere", 2, 1024, 1, 64))],
        Rules(budget=5, window_s=60, backoff_s=0.05, backoff_max_s=0.2),
        Means(command=(sys.executable, SCRIPT, "--fault", "hang-load")),
    )
    starting = asyncio.create_task(cpu.start())
    try:
        await until(lambda: cpu.keeper.alive)
        while cpu.keeper.starts < 2:
            assert owned(cpu)
            await asyncio.sleep(0.02)
    finally:
        await cpu.stop()
        await asyncio.gather(starting, return_exceptions=True)


async def test_a_worker_that_is_let_go_on_must_go_on() -> None:
    """One that hung while the guard had paused it is found when the guard lets it run again."""
    async with engine() as cpu:
        await cpu.start()
        assert cpu.pid is not None
        cpu.set_limits(Limits(max_batch=0))
        cpu.run(request(max_tokens=10), ())
        os.kill(cpu.pid, signal.SIGSTOP)
        assert cpu.keeper.life is not None
        cpu.keeper.life.deadline.cancel()  # as its last frame, told before it hung, would
        assert owned(cpu)  # nothing is owed while it is paused
        cpu.set_limits(Limits(max_batch=2))
        assert owned(cpu)
        assert cpu.keeper.life.deadline.pending


async def test_a_stream_sent_during_the_last_step_of_another_has_a_deadline() -> None:
    """A report that says "idle" does not excuse the worker from what it had not read yet."""
    async with engine() as cpu:
        await cpu.start()
        assert cpu.pid is not None
        os.kill(cpu.pid, signal.SIGSTOP)
        cpu.run(request(max_tokens=10), ())
        life = cpu.keeper.life
        assert life is not None
        life._on_message(wire.Report([], "none", 0, 0, 256, 0.0, 2, 0.0))
        assert life.deadline.pending
        assert owned(cpu)
