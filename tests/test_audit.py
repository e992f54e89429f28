"""The self-audit: what does not add up is found, told in words, and only when it stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import request
from fakes_audit import AuditBench
from fakes_text import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import ACTIONS, virtual

from edged import audit
from edged.audit import (
    LOOKS,
    Descriptors,
    EngineFacts,
    Facts,
    Held,
    Obligation,
    Patience,
    Process,
    StreamFacts,
    Violation,
    violations,
)
from edged.core import Prompt
from edged.engine.foreign import ForeignEngine
from edged.errors import RequestError
from edged.scheduler import Stream
from edged.status import status_of
from edged.text.model import TextModel
from edged.twin.virtual_loop import run_virtual


def kinds(facts: Facts) -> list[str]:
    return [one.kind for one in violations(facts)]


def engine(**more: object) -> Facts:
    return Facts(now_s=100.0, engines=[EngineFacts(**{"name": "npu", "slots": 4, **more})])  # type: ignore[arg-type]


OWN, LEFT = Held(1, owned=True), Held(2, owned=False, closed_s=99.0)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (Facts(0.0), []),
        (Facts(0.0, streams=[StreamFacts("a", "http", "")], queued=1, connections=1), []),
        (Facts(0.0, streams=[StreamFacts("a", "http", "")], connections=1), ["queue"]),
        (Facts(0.0, streams=[StreamFacts("a", "mqtt", "npu")]), ["clients"]),
        (Facts(0.0, streams=[StreamFacts("a", "mqtt", "npu", False)], jobs=1), ["streams"]),
        (Facts(0.0, streams=[StreamFacts("a", "mqtt", "npu", held=False)], jobs=1), ["streams"]),
        (Facts(0.0, writers=2, connections=1), ["clients"]),
        (Facts(0.0, tasks={"run": 60}), []),
        (Facts(0.0, tasks={"run": 60, "Sse._ping": 60}), ["tasks"]),
        (Facts(0.0, tasks={"run": 60, "Sse._ping": 60}, connections=20), []),
        (engine(held=(OWN,), free_slots=3), []),
        (engine(held=(OWN,), free_slots=2), ["slots"]),  # the worker has lost one
        (engine(held=(OWN,), free_slots=4), ["slots"]),  # the worker knows nothing of it
        (engine(held=(OWN,), free_slots=4, owes=True), []),  # it was submitted just now
        (engine(held=(OWN,), free_slots=4, idle=True), []),
        (engine(held=(LEFT,), free_slots=3, owes=True), []),  # its step has not ended yet
        (engine(held=(LEFT,), free_slots=3), ["slots"]),
        (engine(held=(Held(2, False, 1.0),), free_slots=3, owes=True), ["slots"]),
        (engine(held=(), pid=7), []),
        (Facts(0.0, children=[Process(7, zombie=True)]), ["processes"]),
        (Facts(0.0, children=[Process(7)]), []),
        (Facts(0.0, children=[Process(7, worker=True)]), ["processes"]),
        (Facts(0.0, children=[Process(7, worker=True)], strays=1), []),  # cannot be killed: told
        (Facts(0.0, obligations=[Obligation("npu: step", True, 1.0)]), []),
        (Facts(0.0, obligations=[Obligation("npu: step", False)]), ["obligation"]),
        (Facts(9.0, obligations=[Obligation("npu: step", True, 1.0)]), ["obligation"]),
    ],
)
def test_facts_add_up_or_are_told(facts: Facts, found: list[str]) -> None:
    """Each sum is held against the other side of it; what is only in motion is left alone."""
    assert kinds(facts) == found


def test_a_missing_worker_of_an_engine_that_serves_is_told() -> None:
    """An engine that calls itself ready without a process is a violation."""
    serving = EngineFacts("npu", 4, (), pid=7, up=True)
    assert kinds(Facts(0.0, engines=[serving], children=[Process(8)])) == ["processes"]
    assert kinds(Facts(0.0, engines=[serving], children=[Process(7, worker=True)])) == []


def test_a_difference_counts_when_it_stays() -> None:
    """One that comes and goes never counts, one that stays counts once and until it is gone."""
    patience = Patience()
    stays = Violation("slots", "1", "first words")
    for look in range(LOOKS + 3):
        moves = Violation("slots", f"run {look}", "in motion")
        counts, new = patience.feed([stays, moves])
        assert counts == ([stays] if look >= LOOKS - 1 else [])
        assert new == ([stays] if look == LOOKS - 1 else [])
    assert patience.feed([]) == ([], [])


@pytest.mark.parametrize(("grows", "found"), [(0, False), (1, True)])
def test_open_files_that_only_grow_are_told(grows: int, found: bool) -> None:
    """A leak of one file in ten seconds is found within minutes; a busy daemon is none."""
    descriptors, told = Descriptors(), False
    for second in range(600):
        busy = second % 7 * 5  # come and go
        told = bool(descriptors.feed(20 + busy + grows * (second // 10), 0)) or told
    assert told == found


# --- real violations, on fakes --------------------------------------------------------------------


async def looks(bench: AuditBench, count: int = LOOKS) -> tuple[str, ...]:
    for _ in range(count):
        await asyncio.sleep(1)
        bench.watch.look()
    return bench.watch.found


def counted(bench: AuditBench, kind: str) -> bool:
    status = status_of("n", bench.scheduler.load(), [("e", bench.engine.health())], 0.0)
    shown = bench.metrics.exposition(status).decode()
    return f'edged_audit_violations_total{{kind="{kind}"}} 1.0' in shown


@virtual
async def test_a_leaked_slot_is_told_until_it_is_given_back() -> None:
    """A slot that a cancelled stream leaves behind is named, counted, and forgotten when free."""
    bench = AuditBench()
    bench.engine.leaks = True
    stream = bench.scheduler.submit(request(max_tokens=500))
    await asyncio.sleep(0.5)
    stream.cancel()
    assert await looks(bench, LOOKS - 1) == ()
    assert "fake holds a slot for run" in (await looks(bench, 1))[0]
    assert counted(bench, "slots")
    assert bench.watch.withheld() == ""  # no reason to restart the daemon

    bench.engine.runs.clear()
    assert await looks(bench, 1) == ()


@virtual
async def test_a_stream_its_engine_does_not_know_is_told() -> None:
    """A stream that is said to run where nobody has it is named."""
    bench = AuditBench()
    bench.engine.forgets = True
    bench.scheduler.submit(request("lonely", max_tokens=500))
    assert "stream lonely on fake: the engine does not know of it" in await looks(bench)
    assert counted(bench, "streams")


@virtual
async def test_a_stream_nobody_drains_is_told() -> None:
    """A stream whose task is gone is named before its client's patience ends."""
    bench = AuditBench()
    stream = bench.scheduler.submit(request("left", max_tokens=500))
    await asyncio.sleep(0.5)
    running = bench.scheduler.streams[stream]
    assert running is not None
    running.task.cancel()
    found = await looks(bench)
    assert "stream left on fake: nobody reads what it writes" in found


@virtual
async def test_a_stream_that_fell_out_of_the_queue_is_told() -> None:
    """A stream that waits in no queue is a difference of numbers."""
    bench = AuditBench(slots=1)
    bench.scheduler.submit(request("first", max_tokens=500))
    waiting = bench.scheduler.submit(request("second"))
    bench.scheduler._queue.discard(waiting)
    assert await looks(bench) == ("1 streams wait, 0 are in the queue",)
    assert counted(bench, "queue")


@virtual
async def test_a_stream_without_a_client_is_told() -> None:
    """More streams than connections means that somebody's leaving was not heard."""
    bench = AuditBench()
    bench.scheduler.submit(request(max_tokens=500))
    bench.connections = 0
    assert await looks(bench) == ("1 streams for 0 connections",)
    assert counted(bench, "clients")


@virtual
async def test_tasks_nobody_accounts_for_are_told() -> None:
    """Tasks pile up only with what they serve; else their number and name are told."""
    bench = AuditBench()
    bench.connections = bench.jobs = 0
    tasks = [asyncio.create_task(asyncio.sleep(1000)) for _ in range(100)]
    assert "100 are sleep" in (await looks(bench))[0]
    assert counted(bench, "tasks")
    for task in tasks:
        task.cancel()
    assert await looks(bench, 1) == ()


@virtual
async def test_open_files_nobody_accounts_for_are_told() -> None:
    """A hundred open files more than there are connections and workers is a violation."""
    bench = AuditBench()
    bench.connections = 0
    assert await looks(bench, 1) == ()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            for end in os.pipe():
                stack.callback(os.close, end)
        assert "open files belong to no connection" in (await looks(bench))[0]
        assert counted(bench, "descriptors")
    assert await looks(bench, 1) == ()


def test_a_child_nobody_waits_for_and_a_stray_worker_are_told() -> None:
    """A zombie and a worker no engine owns are named by their process number."""
    with subprocess.Popen(["true"]) as zombie, stray() as worker:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended; not reaped
        found = run_virtual(looked())
    assert f"process {zombie.pid} has ended and nobody has taken its exit" in found
    assert f"worker {worker.pid} belongs to no engine" in found
    assert run_virtual(looked()) == ()


async def looked() -> tuple[str, ...]:
    return await looks(AuditBench())


@contextlib.contextmanager
def stray() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import time; time.sleep(60)", "edged.worker"]
    with subprocess.Popen(command) as made:
        try:
            yield made
        finally:
            made.kill()


@virtual
async def test_an_audit_that_fails_is_a_violation_itself() -> None:
    """A bug in the audit is told like any other difference, and restarts nothing."""
    bench = AuditBench()
    bench.engine.health = lambda: 1 / 0  # type: ignore[method-assign,return-value]
    assert await looks(bench) == ("the audit itself failed; see the log",)
    assert bench.watch.withheld() == ""


# --- never a false alarm --------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(actions=ACTIONS, slots=st.integers(1, 3), spares=st.integers(0, 2))
def test_no_life_of_healthy_parts_is_ever_told(
    actions: list[tuple[str, int, int]], slots: int, spares: int
) -> None:
    """Whatever is submitted, cancelled or dies, in any order: a sound daemon adds up."""
    run_virtual(_life(actions, slots, spares))


async def _life(actions: list[tuple[str, int, int]], slots: int, spares: int) -> None:
    bench = AuditBench(slots, spares, max_requests=4)
    streams: list[Stream] = []
    for action, a, b in actions:
        if action == "submit":
            with contextlib.suppress(RequestError):
                streams.append(
                    bench.scheduler.submit(request(str(len(streams)), max_tokens=b * 5, priority=a))
                )
        elif action == "cancel" and streams:
            streams[a % len(streams)].cancel()
        elif action == "die":
            bench.engines[a % len(bench.engines)].die(down_s=a / 2)
        elif action == "row_fault":
            bench.engines[a % len(bench.engines)].row_fault(a)
        elif action == "wait":
            await asyncio.sleep(a / 20)
        elif action == "drain":
            bench.scheduler.drain()
        await asyncio.sleep(0.35)  # longer than a step, shorter than a stream
        bench.watch.look()
        assert bench.watch.found == ()
    bench.scheduler.shed_all()
    await asyncio.sleep(3)
    bench.watch.look()
    assert bench.watch.found == ()


def test_an_audit_costs_little() -> None:
    """An audit of an idle daemon takes a small part of a millisecond of each second."""

    async def measure() -> float:
        bench = AuditBench()
        return min(timeit.repeat(bench.watch.look, number=20, repeat=5)) / 20

    assert run_virtual(measure()) < 0.01  # measured: 0.0003


def test_every_kind_has_a_name_in_the_metrics() -> None:
    """The series of each kind exist from the start, at zero."""
    shown = AuditBench().metrics.audit_violations.family().samples
    assert {sample.labels["kind"] for sample in shown} == set(audit.KINDS)
    assert all(sample.value == 0 for sample in shown)


async def test_a_stream_on_an_engine_with_another_tokenizer_adds_up(tmp_path: Path) -> None:
    """Its slot is found behind the words it is written in; where it is not, that is told."""
    bench = AuditBench()
    foreign = ForeignEngine(
        bench.engine, TextModel.load(write_model(tmp_path / "m", "hello")), 4096
    )
    bench.scheduler._engines = [foreign]
    stream = bench.scheduler.submit(request("f", max_tokens=500, source=Prompt("hello")))
    while not bench.engine.runs:
        bench.watch.look()
        await asyncio.sleep(0.01)
    for _ in range(LOOKS):
        bench.watch.look()
        assert bench.watch.found == ()
    bench.engine.forgets = True
    for _ in range(LOOKS):
        bench.watch.look()
    assert "stream f on fake: the engine does not know of it" in bench.watch.found
    stream.cancel()
