"""What an engine promises about its worker process, with real processes that really die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes import request

from edged import wire
from edged.core import Limits
from edged.engine.restarts import RestartPolicy
from edged.engine.run import WorkerRun
from edged.engine.worker_engine import WorkerEngine
from edged.errors import EngineFault, RowFault

SCRIPT = str(Path(__file__).parent / "scripted_worker.py")
QUICK = RestartPolicy(budget=5, window_s=60, backoff_s=0.05, backoff_max_s=0.2)


@asynccontextmanager
async def engine(fault: str = "none", slots: int = 2) -> AsyncIterator[WorkerEngine]:
    made = WorkerEngine(
        "cpu",
        "scripted",
        wire.Launch("cpu", "/nowhere", slots, 1024, 1, 64),
        QUICK,
        command=(sys.executable, SCRIPT, "--fault", fault),
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
        with pytest.raises(EngineFault, match="hung"):
            await ids(cpu.run(request(max_tokens=100), ()))


async def test_a_stopped_process_is_a_hang_too() -> None:
    """SIGSTOP in mid-stream ends the stream within the step deadline."""
    async with engine() as cpu:
        await cpu.start()
        run = cpu.run(request(max_tokens=10_000), ())
        await run.__anext__()
        os.kill(cpu.pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineFault, match="hung"):
            await ids(run)


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
        cpu.set_limits(Limits(max_batch=1))
        await cpu.start()
        os.kill(cpu.pid or 0, signal.SIGKILL)
        await until(lambda: cpu.health().restarts == 1 and cpu.health().state == "ready")
        assert await ids(cpu.run(request(max_tokens=2), ())) == [1, 2]


def test_restarts_back_off_within_a_budget() -> None:
    """Delays double to the cap; over the budget the next start waits for the window."""
    policy = RestartPolicy(budget=3, window_s=100, backoff_s=1, backoff_max_s=3)
    deaths = (10.0, 20.0, 30.0)

    assert [policy.delay_s(deaths[:n], 30.0) for n in range(4)] == [0, 1, 2, 3]
    assert not policy.exhausted(deaths, 30.0)
    four = (*deaths, 40.0)
    assert policy.exhausted(four, 40.0)
    assert policy.delay_s(four, 40.0) == 70.0  # when the death at 10 leaves the window
    assert policy.delay_s(four, 145.0) == 0.0


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
