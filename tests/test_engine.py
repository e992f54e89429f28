"""What an engine promises about its worker process, with real processes that really die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import request

from edged import ladder, wire
from edged.core import Limits
from edged.engine import worker_engine
from edged.engine.life import Life, Means
from edged.engine.output import LINES_PER_S, OutputLog
from edged.engine.process import WorkerProcess
from edged.engine.run import WorkerRun
from edged.engine.rungs import Rung
from edged.engine.worker_engine import WorkerEngine
from edged.errors import EngineFault, RowFault
from edged.ladder import Rules

SCRIPT = str(Path(__file__).parent / "scripted_worker.py")
QUICK = Rules(budget=5, window_s=60, backoff_s=0.05, backoff_max_s=0.2)


@asynccontextmanager
async def engine(fault: str = "none", slots: int = 2) -> AsyncIterator[WorkerEngine]:
    made = WorkerEngine(
        "cpu",
        "scripted",
        [Rung(f"{slots} slots", wire.Launch("cpu", "/nowhere", slots, 1024, 1, 64))],
        QUICK,
        Means(command=(sys.executable, SCRIPT, "--fault", fault)),
    )
    try:
        yield made
    finally:
        await made.stop()


async def ids(run: WorkerRun) -> list[int]:
    return [i async for step in run for i in step.token_ids]


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while not condition() and loop.time() < end_s:
        await asyncio.sleep(0.01)  # a real process: there is no event of ours to wait for
    assert condition()


async def test_streams_run_side_by_side_and_give_their_slots_back() -> None:
    """Each run yields its own ids and ends; capacity follows the worker's reports."""
    async with engine() as cpu:
        await cpu.start()
        assert cpu.capacity() == 2
        runs = [cpu.run(request("a", max_tokens=3), ()), cpu.run(request("b", max_tokens=5), (7,))]
        assert cpu.capacity() == 0

        assert await asyncio.gather(*(ids(run) for run in runs)) == [[1, 2, 3], [2, 3, 4, 5]]
        assert cpu.capacity() == 2
        assert cpu.health().state == "ready"


async def test_closing_a_run_frees_its_slot_when_the_worker_says_so() -> None:
    """A closed run ends at once for its reader; its slot returns with the worker's next report."""
    async with engine() as cpu:
        await cpu.start()
        run = cpu.run(request(max_tokens=10_000), ())
        await run.__anext__()
        run.close()
        assert cpu.capacity() == 1
        await until(lambda: cpu.capacity() == 2)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_a_killed_worker_fails_its_streams_and_is_restarted(signum: int) -> None:
    """Death by any signal is told by name to every stream; a new worker serves the next one."""
    async with engine() as cpu:
        await cpu.start()
        first = cpu.pid
        runs = [cpu.run(request(max_tokens=10_000), ()) for _ in range(2)]
        await runs[0].__anext__()
        assert first is not None
        os.kill(first, signum)
        for run in runs:
            with pytest.raises(EngineFault, match=signal.Signals(signum).name):
                await ids(run)

        await until(lambda: cpu.health().state == "ready")
        assert cpu.pid != first
        assert cpu.health().restarts == 1
        assert await ids(cpu.run(request(max_tokens=2), ())) == [1, 2]


async def test_a_hung_step_is_judged_by_its_deadline() -> None:
    """A worker that misses its announced deadline is killed and its streams are told why."""
    async with engine("hang-at-3") as cpu:
        await cpu.start()
        with pytest.raises(EngineFault, match=r"hung: step did not end within 0\.8 s"):
            await asyncio.wait_for(ids(cpu.run(request(max_tokens=100), ())), 10)


async def test_a_stopped_process_is_a_hang_too() -> None:
    """SIGSTOP in mid-stream ends the stream within the step deadline."""
    async with engine() as cpu:
        await cpu.start()
        run = cpu.run(request(max_tokens=10_000), ())
        await run.__anext__()
        os.kill(cpu.pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineFault, match="hung"):
            await ids(run)


async def test_a_paused_worker_is_not_judged_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Limits let nothing run the worker owes no answer; otherwise silence is a hang."""
    monkeypatch.setattr(worker_engine, "_ANSWER_WITHIN_S", 0.1)
    async with engine("mute") as cpu:
        await cpu.start()
        cpu.set_limits(Limits(max_batch=0))
        first = cpu.run(request(), ())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first.__anext__(), 1)
        assert cpu.health().state == "ready"
        cpu.set_limits(Limits(max_batch=2))
        with pytest.raises(EngineFault, match="begin a step"):
            await ids(cpu.run(request(), ()))


async def test_a_worker_that_calls_itself_idle_still_owes_what_was_sent_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A self test that ends just as a stream is submitted does not take its deadline away."""
    monkeypatch.setattr(worker_engine, "_ANSWER_WITHIN_S", 0.2)
    async with engine("idle-mute") as cpu:
        await cpu.start()
        run = cpu.run(request(), ())
        cpu.probe()
        with pytest.raises(EngineFault, match="begin a step"):
            await asyncio.wait_for(ids(run), 5)


async def test_limits_that_admit_nothing_leave_no_capacity() -> None:
    """`admit` closes the engine to new streams and opens it again, and says so both times."""
    async with engine() as cpu:
        await cpu.start()
        told: list[int] = []
        cpu.on_change = lambda: told.append(cpu.capacity())
        cpu.set_limits(Limits(max_batch=2, admit=False))
        cpu.set_limits(Limits(max_batch=2, admit=True))
        assert told == [0, 2]


async def test_a_request_that_fits_no_frame_takes_no_slot() -> None:
    """A prompt beyond the wire's limit is that request's fault alone."""
    async with engine() as cpu:
        await cpu.start()
        with pytest.raises(EngineFault, match="over the limit"):
            cpu.run(request(prompt=400_000), ())
        assert cpu.capacity() == 2


async def test_no_descriptors_left_is_a_failed_start_not_the_end() -> None:
    """An engine that cannot make a process says so and tries again until it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with engine() as cpu:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # new ones would be number 3 or more
        try:
            with pytest.raises(EngineFault, match="cannot start"):
                await cpu.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: cpu.health().state == "ready")


async def test_stop_does_not_wait_for_a_load() -> None:
    """A worker that loads hears nothing; it is ended at once."""
    async with engine("hang-load") as cpu:
        starting = asyncio.create_task(cpu.start())
        await until(lambda: cpu.health().last_progress_s is not None)
        await asyncio.wait_for(cpu.stop(), 3)
        assert cpu.health().state == "off"
        with pytest.raises(EngineFault):
            await starting


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang-load", "loading did not end"),
        ("version", "wire version 99"),
        ("junk", "unreadable frame"),
        ("fault-load", "model.onnx is missing"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(fault: str, words: str) -> None:
    """start() raises with the cause, and the engine goes on trying by itself."""
    async with engine(fault) as cpu:
        with pytest.raises(EngineFault, match=words):
            await cpu.start()
        await until(lambda: cpu.health().restarts >= 1)
        assert cpu.capacity() == 0
        with pytest.raises(EngineFault, match="not ready"):
            cpu.run(request(), ())


async def test_stop_leaves_no_process(tmp_path: Path) -> None:
    """After stop the worker is reaped, in whatever phase it was."""
    async with engine() as cpu:
        await cpu.start()
        pid = cpu.pid or 0
        run = cpu.run(request(max_tokens=10_000), ())
        await run.__anext__()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert cpu.health().state == "off"


async def test_limits_set_before_a_restart_hold_after_it() -> None:
    """A restarted worker is told the present Limits."""
    async with engine() as cpu:
        batches: list[int] = []
        cpu.on_report = lambda report: batches.append(report.batch)
        cpu.set_limits(Limits(max_batch=1))
        await cpu.start()
        os.kill(cpu.pid or 0, signal.SIGKILL)
        await until(lambda: cpu.health().restarts == 1 and cpu.health().state == "ready")
        assert await ids(cpu.run(request(max_tokens=2), ())) == [1, 2]
        assert batches == [1, 1]


async def test_what_a_worker_started_neither_hides_its_death_nor_outlives_it() -> None:
    """A process of the worker's own that holds its pipes delays nothing and dies with it."""
    async with engine("leaves-helper") as cpu:
        await cpu.start()
        session = cpu.pid or 0
        run = cpu.run(request(max_tokens=10_000), ())
        await run.__anext__()
        os.kill(session, signal.SIGKILL)
        with pytest.raises(EngineFault, match="SIGKILL"):
            await asyncio.wait_for(ids(run), 10)
        await until(lambda: cpu.health().state == "ready")
        await until(lambda: not living_in(session))


def living_in(session: int) -> list[psutil.Process]:
    """Processes of a session, without those that are dead and wait for their parent."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def test_restarts_back_off_within_a_budget() -> None:
    """Delays double to the cap; over the budget the engine is off for the window, then tries on."""
    rules = Rules(budget=3, window_s=100, backoff_s=1, backoff_max_s=3)
    state, actions = ladder.State(), []
    for at_s in (10.0, 20.0, 30.0, 40.0):
        state, action = ladder.advance(rules, state, ladder.Failed("death"), at_s)
        actions.append((action.kind, action.delay_s))
    assert actions == [("start", 1), ("start", 2), ("start", 3), ("off", 100)]
    state, action = ladder.advance(rules, state, ladder.Failed("death"), 200.0)
    assert (action.kind, action.delay_s) == ("start", 1)


async def test_a_late_reader_gets_one_step_for_several() -> None:
    """Rows that arrive before they are read coalesce, in order, with the first cached count."""
    run = WorkerRun(cancel=lambda: None)
    run.feed(wire.Row(1, [5], [(-0.5, [(5, -0.5)])], "", "", 2))
    run.feed(wire.Row(1, [6], [(-0.1, [])], "length", "", -1))
    step = await run.__anext__()

    assert (step.token_ids, step.finish, step.cached_tokens) == ((5, 6), "length", 2)
    assert [p.logprob for p in step.logprobs] == [-0.5, -0.1]
    with pytest.raises(StopAsyncIteration):
        await run.__anext__()


async def test_a_row_fault_reaches_its_own_run_only() -> None:
    """A row fault is raised to the reader of that run after what was already written."""
    run = WorkerRun(cancel=lambda: None)
    run.feed(wire.Row(1, [5], [], "", "", -1))
    run.feed(wire.Row(1, [], [], "row_fault", "NaN logits", -1))
    assert (await run.__anext__()).token_ids == (5,)
    with pytest.raises(RowFault, match="NaN"):
        await run.__anext__()


def test_what_a_worker_prints_is_bounded() -> None:
    """A flood costs a few lines a second and says how many were dropped; no line is endless."""
    lines: list[str] = []
    dropped: list[int] = []
    log = OutputLog(lines.append, dropped.append)
    log.feed(b"half ", 0.0)
    log.feed(b"a line\nx" + b"y" * 100_000, 0.0)
    log.feed(b"z\n" + b"flood\n" * 100, 0.1)
    assert lines[0] == "half a line"
    assert len(lines[1]) <= 1000
    assert (len(lines), dropped) == (LINES_PER_S, [])

    log.feed(b"later\nunfinished", 1.5)
    log.end(1.6)
    assert lines[LINES_PER_S:] == ["later", "unfinished"]
    assert dropped == [102 - LINES_PER_S]


async def test_stopping_ends_an_engine_whose_cancellation_got_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wait_for of Python < 3.12 swallows a cancellation that comes with the end it waits for: no
    new worker is started for that."""
    real = Life.run

    async def run(self: Life) -> None:
        try:
            await real(self)
        except asyncio.CancelledError:
            await self.stop()

    monkeypatch.setattr(Life, "run", run)
    async with engine() as cpu:
        await cpu.start()
        await asyncio.wait_for(cpu.stop(), 10)
        assert cpu.keeper.starts == 1


async def test_a_machine_without_threads_to_spare_costs_a_start_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for a child may need a thread (Python < 3.12): it is tried again."""
    real, tries = WorkerProcess.exec, 0

    async def execute(self: WorkerProcess, *rest: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("can't start new thread")
        await real(self, *rest)

    monkeypatch.setattr(WorkerProcess, "exec", execute)
    async with engine() as cpu:
        with pytest.raises(EngineFault, match="new thread"):
            await asyncio.wait_for(cpu.start(), 10)
        await until(lambda: cpu.health().state == "ready")
