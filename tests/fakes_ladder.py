"""A board for the ladder: scripted workers as real processes, and a memory that they fill."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from fakes import LetterText

from edged import wire
from edged.engine import Link
from edged.engine.fallback import Fallback
from edged.engine.gate import Gate
from edged.engine.life import Means
from edged.engine.overseer import Overseer, Watch
from edged.engine.rungs import Rung
from edged.engine.worker_engine import WorkerEngine
from edged.ladder import Rules
from edged.memory import Admission, Memory, Needs, Pressure
from edged.queue import Queue
from edged.scheduler import Scheduler

SCRIPT = str(Path(__file__).parent / "scripted_worker.py")
MIB = 1 << 20
QUICK = Rules(
    rungs=3,
    budget=2,
    window_s=60,
    backoff_s=0.05,
    backoff_max_s=0.2,
    climb_after_s=0.5,
    climb_max_s=60,
    memory_settle_s=0.1,
    memory_retry_s=0.1,
    pressure_pause_s=0.2,
)


class BoardMemory(Memory):
    """What is available falls by what each living worker of the board holds."""

    def __init__(self, available_mib: int) -> None:
        super().__init__(Path("/nowhere"))
        self.free_bytes = available_mib * MIB
        self.engines: list[WorkerEngine] = []
        self.full_percent = 0.0
        self.kills = 0
        self.least_bytes = self.free_bytes

    def available_bytes(self) -> int:
        held = 0
        for engine in self.engines:
            needs = engine.keeper.rung.needs
            if needs is not None and engine.pid and psutil.pid_exists(engine.pid):
                held += needs.held_bytes
        self.least_bytes = min(self.least_bytes, self.free_bytes - held)
        return self.free_bytes - held

    def pressure(self) -> Pressure:
        return Pressure(self.full_percent, self.full_percent)

    def oom_kills(self) -> int:
        return self.kills


class Board:
    """An NPU and a CPU engine, a scheduler in front, an overseer behind. lazy: the CPU engine is
    not loaded at first; warm: it is to stay loaded; between: engines between the two."""

    def __init__(
        self,
        available_mib: int = 8000,
        npu_mib: Sequence[int] = (1000, 600, 400),
        cpu_mib: int = 1000,
        lazy: bool = False,
        warm: bool = False,
        idle_s: float = 0.5,
        fault: str = "none",
        between: Sequence[Link] = (),
    ) -> None:
        self.memory = BoardMemory(available_mib)
        admission = Admission(self.memory)
        command = (sys.executable, SCRIPT, "--fault", fault)
        means = Means(command=command, memory=self.memory)
        self.npu = WorkerEngine(
            "npu",
            "scripted",
            [_rung("npu", 8 >> n, mib) for n, mib in enumerate(npu_mib)],
            Rules(**{**vars(QUICK), "rungs": len(npu_mib)}),
            means,
            Gate("npu", admission),
        )
        self.cpu = WorkerEngine(
            "cpu",
            "scripted",
            [_rung("cpu", 2, cpu_mib)],
            Rules(**{**vars(QUICK), "rungs": 1}),
            Means(command=(sys.executable, SCRIPT, "--fault", "none"), memory=self.memory),
            Gate("cpu", admission),
        )
        if lazy:
            self.cpu.keeper.park("waits")
        self.memory.engines = [self.npu, self.cpu]
        self.moves: list[tuple[str, str]] = []
        self.stream_moves: list[tuple[str, str, str]] = []
        fallback = Fallback(self.cpu, (self.npu,), idle_s, lazy=not warm)
        self.overseer = Overseer(
            (self.npu, self.cpu), fallback, self.memory, Watch(200 * MIB, 50.0, 10.0)
        )
        self.scheduler = Scheduler(
            (self.npu, *between, self.cpu),
            {"fake": LetterText()},  # type: ignore[dict-item]
            Queue(64, 1_000_000, 10.0),
            on_leave=self.overseer.need,
            on_move=lambda *move: self.stream_moves.append(move),
        )
        self.overseer.covered = lambda: self.scheduler.covered("cpu")
        for engine in (self.npu, self.cpu):
            engine.on_change = self._changed
            engine.on_move = lambda reason, name=engine.name: self.moves.append((name, reason))  # type: ignore[misc]

    def _changed(self) -> None:
        self.overseer.review()
        self.scheduler.dispatch()


def _rung(engine: str, slots: int, held_mib: int) -> Rung:
    launch = wire.Launch(engine, "/nowhere", slots, 1024, 1, 64)
    return Rung(f"{slots} slots", launch, Needs(0, held_mib * MIB, 0))


@asynccontextmanager
async def running(board: Board) -> AsyncIterator[Board]:
    """Started, and looked after ten times as often as in life."""

    async def look() -> None:
        while True:
            await asyncio.sleep(0.1)
            board.overseer.look()

    task = asyncio.create_task(look())
    starts = [asyncio.create_task(engine.start()) for engine in (board.npu, board.cpu)]
    try:
        yield board
    finally:
        task.cancel()
        await asyncio.gather(board.npu.stop(), board.cpu.stop())
        await asyncio.gather(task, *starts, return_exceptions=True)


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while not condition() and loop.time() < end_s:
        await asyncio.sleep(0.01)  # a real process: there is no event of ours to wait for
    assert condition()
