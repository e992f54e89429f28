"""The ladder at work: real worker processes that die, hang and run out of memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import msgspec
import pytest
from fakes import FakeEngine, FakeRun, LetterText, request
from fakes_ladder import MIB, Board, running, until

from edged import wire
from edged.core import Delta, Finish, Limits, Request
from edged.engine.causes import cause_of, cause_of_exit
from edged.engine.repetition import Repetition
from edged.errors import EngineFault
from edged.ladder import Failed
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream


async def read(stream: Stream) -> tuple[int, Finish]:
    """(tokens seen, how it ended)"""
    tokens = 0
    async for event in stream:
        if isinstance(event, Delta):
            tokens += len(event.token_ids)
        else:
            finish = event
    return tokens, finish


def names(finish: Finish) -> list[str]:
    return [span.name for span in finish.engines]


async def ready(board: Board) -> None:
    await until(lambda: board.npu.health().state == "ready")


async def test_a_worker_out_of_memory_returns_with_fewer_slots() -> None:
    """Out of memory in a step: its streams go on with the CPU, it restarts a rung lower, new
    requests return to it, and status says why."""
    async with running(Board(fault="memory-at-3")) as board:
        await ready(board)
        assert board.npu.health().rung == "8 slots"
        tokens, finish = await read(board.scheduler.submit(request("a", max_tokens=40)))

        assert (tokens, finish.reason, names(finish)) == (40, "length", ["npu", "cpu"])
        assert board.stream_moves == [("npu", "cpu", "engine_fault")]
        await ready(board)
        health = board.npu.health()
        assert (health.rung, health.rung_number, health.slots) == ("4 slots", 1, 4)
        assert health.reason.startswith("memory: memory: decode: no more")
        assert board.moves == [("npu", "memory")]


async def test_it_climbs_back_when_it_was_stable() -> None:
    """After the stable time the full configuration is tried again, not before."""
    async with running(Board()) as board:
        await ready(board)
        board.npu.press("little memory")
        await until(lambda: board.npu.health().slots == 4)
        assert board.npu.health().next_climb_s is not None
        began_s = asyncio.get_running_loop().time()
        await until(lambda: board.npu.health().slots == 8)
        assert asyncio.get_running_loop().time() - began_s >= 0.4
        assert board.npu.health().next_climb_s is None
        assert board.moves == [("npu", "pressure"), ("npu", "climb")]


async def test_a_climb_lets_running_streams_end_where_they_are() -> None:
    """Going up interrupts nobody: what runs ends on the old worker, what comes waits or goes on
    elsewhere."""
    async with running(Board()) as board:
        await ready(board)
        board.npu.press("little memory")
        await until(lambda: board.npu.health().state == "ready" and board.npu.health().slots == 4)
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=150))))
        await until(lambda: "its streams end" in board.npu.health().detail)
        _, finish = await stream
        assert (finish.reason, names(finish)) == ("length", ["npu"])
        await until(lambda: board.npu.health().slots == 8)


async def test_a_restart_on_purpose_never_calls_for_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step down under pressure and a climb that a stream outlasts wait for the engine itself: on
    a small board the fallback would take the memory that the restart needs."""
    monkeypatch.setattr("edged.engine.keeper._DRAIN_S", 0.3)
    async with running(Board(available_mib=1900, lazy=True)) as board:
        await ready(board)
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=250))))
        await until(lambda: board.npu.health().running == 1)
        board.npu.press("little memory")
        await until(lambda: board.npu.health().slots == 4)
        _, finish = await stream
        assert (set(names(finish)), finish.reason) == ({"npu"}, "length")
        await until(lambda: board.npu.health().slots == 8)
        assert board.moves == [("npu", "pressure"), ("npu", "climb")]
        assert (board.cpu.health().standby, board.cpu.health().restarts) == (True, 0)


async def test_a_fallback_that_opens_again_lets_in_who_waits() -> None:
    """It was closed for an engine that then found other memory, or none: nobody waits for a third
    event to be served."""
    async with running(Board()) as board:
        await until(lambda: board.cpu.health().state == "ready")
        board.npu.keeper.park("test")
        board.cpu.closed = True
        stream = asyncio.create_task(read(board.scheduler.submit(request())))
        _, finish = await asyncio.wait_for(stream, 10)
        assert names(finish) == ["cpu"]


async def test_limits_reach_a_worker_that_waits_for_its_last_streams() -> None:
    """A chip that gets hot while a climb waits is cooled all the same: its old worker obeys."""
    async with running(Board()) as board:
        await ready(board)
        batches: list[int] = []
        board.npu.on_report = lambda report: batches.append(report.batch)
        board.npu.press("little memory")
        await until(lambda: board.npu.health().state == "ready" and board.npu.health().slots == 4)
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=150))))
        await until(lambda: "its streams end" in board.npu.health().detail)
        board.npu.set_limits(Limits(3))
        _, finish = await stream
        assert names(finish) == ["npu"]
        assert 3 in batches


async def test_memory_pressure_steps_down_before_the_kernel_kills() -> None:
    """Tasks that wait for memory end the idle fallback first, then cost the NPU's slots; the
    streams go on without a failure."""
    async with running(Board()) as board:
        await ready(board)
        await until(lambda: board.cpu.health().state == "ready")
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=300))))
        await until(lambda: board.npu.health().running == 1)
        board.memory.full_percent = 30.0
        await until(lambda: board.cpu.health().standby)
        assert board.npu.health().rung_number == 0
        await until(lambda: board.npu.health().rung_number == 1)
        board.memory.full_percent = 0.0
        tokens, finish = await stream
        assert (tokens, finish.reason) == (300, "length")
        assert ("npu", "pressure") in board.moves


async def test_a_load_that_does_not_fit_is_not_tried() -> None:
    """The first rung whose sum fits is started; nothing larger ever was."""
    async with running(Board(available_mib=1200, lazy=True)) as board:
        await ready(board)
        assert board.npu.health().rung == "4 slots"
        assert board.npu.health().restarts == 0
        assert "600" in board.npu.health().memory


async def test_without_memory_it_is_off_with_the_sum_and_starts_when_there_is_some() -> None:
    """No rung fits: off, with the whole sum in words; memory that comes back is noticed."""
    board = Board(available_mib=700)
    async with running(board):
        await until(lambda: board.npu.health().detail.startswith("not enough memory for 2 slots"))
        await until(lambda: board.npu.health().state == "off")
        assert board.npu.health().detail.startswith(
            "not enough memory for 2 slots: weights 400 + slots 0 + loading 0 + spare 512 = 912 "
            "MiB, 700 MiB are available"
        )
        board.memory.free_bytes = 2000 * MIB
        await ready(board)


async def test_start_says_when_there_is_no_memory() -> None:
    """Who waits for the first start is told at once, not after a time-out."""
    board = Board(available_mib=700)
    with pytest.raises(EngineFault, match="not enough memory"):
        await board.npu.start()
    await board.npu.stop()


async def test_a_kill_by_the_kernel_for_memory_counts_as_lack_of_memory() -> None:
    """SIGKILL and one more OOM kill in the kernel's count: the next launch is a smaller one."""
    async with running(Board()) as board:
        await ready(board)
        board.memory.kills += 1
        os.kill(board.npu.pid or 0, signal.SIGKILL)
        await until(lambda: board.npu.health().slots == 4)


async def test_a_killed_worker_keeps_its_rung() -> None:
    """Death by any other cause is answered by the same launch, within the budget."""
    async with running(Board()) as board:
        await ready(board)
        os.kill(board.npu.pid or 0, signal.SIGKILL)
        await until(lambda: board.npu.health().restarts == 1)
        await ready(board)
        assert board.npu.health().rung_number == 0
        assert board.moves == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("fatal-at-3", "fatal"), ("hang-at-3", "hang"), ("wrong-probe", "self_test")],
)
async def test_a_rung_that_keeps_failing_is_left(fault: str, reason: str) -> None:
    """Fatal codes, hangs and failed self tests beyond the budget cost the rung, and say so."""
    async with running(Board(fault=fault)) as board:
        for _ in range(3):
            await ready(board)
            before = board.npu.health().restarts
            if fault == "wrong-probe":
                board.npu.probe()
            else:
                board.scheduler.submit(request(max_tokens=40))
            await until(lambda before=before: board.npu.health().restarts > before)  # type: ignore[misc]
        await ready(board)
        assert board.npu.health().rung_number == 1
        assert board.moves[0] == ("npu", reason)


async def test_a_passed_self_test_changes_nothing() -> None:
    """Streams run on through a probe."""
    async with running(Board()) as board:
        await ready(board)
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=50))))
        await until(lambda: board.npu.health().running == 1)
        board.npu.probe()
        _, finish = await stream
        assert (names(finish), board.npu.health().restarts) == (["npu"], 0)


async def test_a_lazy_fallback_is_started_by_the_first_failure_and_nothing_is_lost() -> None:
    """Streams of a dead NPU wait for the CPU engine, which is started for them, and go on."""
    async with running(Board(lazy=True)) as board:
        await ready(board)
        assert (board.cpu.health().state, board.cpu.health().standby) == ("off", True)
        tasks = [
            asyncio.create_task(read(board.scheduler.submit(request(str(n), max_tokens=60))))
            for n in range(2)
        ]
        await until(lambda: board.npu.health().running == 2)
        os.kill(board.npu.pid or 0, signal.SIGKILL)
        for tokens, finish in await asyncio.gather(*tasks):
            assert (tokens, finish.reason, names(finish)) == (60, "length", ["npu", "cpu"])


async def test_a_lazy_fallback_is_parked_again_when_it_is_idle() -> None:
    """Once the NPU serves and the CPU engine had no work for a while, it gives its memory back."""
    async with running(Board(lazy=True)) as board:
        await ready(board)
        os.kill(board.npu.pid or 0, signal.SIGKILL)
        await until(lambda: board.cpu.health().state == "ready")
        await ready(board)
        await until(lambda: board.cpu.health().standby)
        assert "idle" in board.cpu.health().detail
        assert "streams then wait about" in board.cpu.health().detail


class Picky(FakeEngine):
    """Takes words only, where requests bring ids."""

    def unsuited(self, request: Request, begun: bool) -> str:
        return "prompt"

    def run_text(self, request: Request, written: str) -> FakeRun:
        raise NotImplementedError


@pytest.mark.parametrize("fault", ["none", "nan-at-3"])
async def test_a_lazy_fallback_is_not_called_while_an_engine_before_it_serves(fault: str) -> None:
    """Whatever befalls the NPU, streams go on with the next engine of the chain, and nobody loads
    a model for nothing."""
    between = FakeEngine(step_s=0.001, name="openai")
    async with running(Board(lazy=True, fault=fault, between=[between])) as board:
        await ready(board)
        stream = asyncio.create_task(read(board.scheduler.submit(request(max_tokens=60))))
        if fault == "none":
            await until(lambda: board.npu.health().running == 1)
            os.kill(board.npu.pid or 0, signal.SIGKILL)
        tokens, finish = await stream
        assert (tokens, finish.reason, names(finish)) == (60, "length", ["npu", "openai"])
        await ready(board)
        assert (board.cpu.health().standby, board.cpu.health().restarts) == (True, 0)


def without_npu(between: FakeEngine) -> Board:
    """A board whose NPU finds no memory, and which has another engine before the CPU's."""
    return Board(available_mib=1800, npu_mib=(5000,), lazy=True, between=[between])


async def test_a_lazy_fallback_is_called_when_the_engine_before_it_fails_too() -> None:
    """The NPU is away and the next engine goes as well: the fallback is loaded at that moment."""
    between = FakeEngine(name="openai")
    async with running(without_npu(between)) as board:
        await until(lambda: board.npu.health().detail.startswith("not enough memory"))
        await asyncio.sleep(0.3)  # three looks
        assert board.cpu.health().standby
        between.state = "failed"
        await until(lambda: board.cpu.health().state == "ready")


async def test_a_lazy_fallback_is_called_for_a_stream_that_no_engine_before_it_suits() -> None:
    """One that the next engine cannot take is not left waiting for the NPU, nor given up."""
    async with running(without_npu(Picky(name="openai"))) as board:
        await until(lambda: board.npu.health().detail.startswith("not enough memory"))
        await until(lambda: board.npu.health().state == "off")
        assert board.cpu.health().standby
        tokens, finish = await read(board.scheduler.submit(request(max_tokens=30)))
        assert (tokens, finish.reason, names(finish)) == (30, "length", ["cpu"])


async def test_a_warm_fallback_returns_when_memory_has_long_been_calm() -> None:
    """Parked once for want of memory it is loaded again by itself; parked again, after twice as
    long."""
    loop = asyncio.get_running_loop()
    waited_s = []
    async with running(Board(warm=True, idle_s=0.4)) as board:
        await ready(board)
        for _ in range(2):
            await until(lambda: board.cpu.health().state == "ready")
            board.memory.full_percent = 30.0
            await until(lambda: board.cpu.health().standby)
            board.memory.full_percent = 0.0
            calm_s = loop.time()
            await until(lambda: not board.cpu.health().standby)
            waited_s.append(loop.time() - calm_s)
    assert waited_s[0] >= 0.4
    assert waited_s[1] >= 0.8


async def test_a_warm_fallback_returns_only_where_it_leaves_memory_to_spare() -> None:
    """It would fit, but the next moment of pressure would cost it again: it waits for more."""
    async with running(Board(available_mib=2900, npu_mib=(1000,), warm=True, idle_s=0.2)) as board:
        await ready(board)
        await until(lambda: board.cpu.health().state == "ready")
        board.memory.full_percent = 30.0
        await until(lambda: board.cpu.health().standby)
        board.memory.full_percent = 0.0
        await asyncio.sleep(1.0)  # five times the pause
        assert board.cpu.health().standby
        board.memory.free_bytes = 4000 * MIB
        await until(lambda: board.cpu.health().state == "ready")


async def test_a_row_fault_starts_the_lazy_fallback_too() -> None:
    """The NPU serves on; the one stream it cannot serve waits for the CPU engine."""
    async with running(Board(lazy=True, fault="nan-at-3")) as board:
        await ready(board)
        tokens, finish = await read(board.scheduler.submit(request(max_tokens=30)))
        assert (tokens, finish.reason, names(finish)) == (30, "length", ["npu", "cpu"])
        assert board.npu.health().state == "ready"


async def test_on_a_small_board_npu_and_cpu_do_not_fight_for_memory() -> None:
    """8 GB, room for one model at a time: the NPU dies while requests keep coming. No load is
    tried that does not fit, nobody flaps, every request is answered, and the NPU is back in the
    end with the CPU engine parked."""
    board = Board(available_mib=4500, npu_mib=(3000, 2600), cpu_mib=2500, lazy=True, idle_s=1.0)
    answered: list[Finish] = []

    async def ask_on() -> None:
        while True:
            answered.append((await read(board.scheduler.submit(request(max_tokens=30))))[1])

    async with running(board):
        await ready(board)
        clients = [asyncio.create_task(ask_on()) for _ in range(2)]
        try:
            await until(lambda: len(answered) >= 2)
            os.kill(board.npu.pid or 0, signal.SIGKILL)
            await until(lambda: board.cpu.health().running > 0)
            assert board.npu.health().state != "ready"
            await until(lambda: board.npu.health().state == "ready", within_s=30)
            count = len(answered)
            await until(lambda: len(answered) >= count + 4)
            assert names(answered[-1]) == ["npu"]
            assert board.cpu.health().standby
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    assert {finish.reason for finish in answered} == {"length"}
    assert board.memory.least_bytes >= 0
    assert (board.npu.health().restarts, board.cpu.health().restarts) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "detail", "cause"),
    [
        ("memory", "load: no memory", "memory"),
        ("fatal", "rt.synchronize_stream failed with 507015 RT_AICORE_EXCEPTION", "fatal"),
        ("fatal", "rt.memcpy failed with 507010 RT_LOST_HEARTBEAT: gone", "lost"),
        ("internal", "rt.set_device failed with 207004 RT_NO_DEVICE", "lost"),
        ("self_test", "token 3 differs", "self_test"),
        ("something new", "", "internal"),
    ],
)
def test_a_workers_fault_has_one_word(kind: str, detail: str, cause: str) -> None:
    """What a worker says before it exits becomes the ladder's cause."""
    assert cause_of(wire.Fault(kind, detail)) == cause


def test_an_exit_is_a_death_unless_the_kernel_counted_it() -> None:
    """Only SIGKILL together with a new kill in the kernel's own count means memory."""
    assert cause_of_exit("killed by SIGKILL", 3, 4) == "memory"
    assert cause_of_exit("killed by SIGKILL", 3, 3) == "death"
    assert cause_of_exit("killed by SIGSEGV", 3, 4) == "death"
    assert cause_of_exit("killed by SIGKILL", None, 4) == "death"


async def test_a_step_down_without_another_engine_loses_nothing() -> None:
    """The only engine restarts on purpose: its streams wait for it and go on there."""
    board = Board()
    alone = Scheduler(
        (board.npu,),
        {"fake": LetterText()},  # type: ignore[dict-item]
        Queue(8, 100_000, 10.0),
    )
    board.npu.on_change = alone.dispatch
    try:
        await board.npu.start()
        stream = asyncio.create_task(read(alone.submit(request(max_tokens=100))))
        await until(lambda: board.npu.health().running == 1)
        board.npu.press("little memory")
        tokens, finish = await stream
    finally:
        await board.npu.stop()
    assert (tokens, finish.reason) == (100, "length")
    assert [(span.name, span.reason) for span in finish.engines] == [
        ("npu", "first"),
        ("npu", "engine_moved"),
    ]


async def test_two_row_faults_in_a_minute_ask_for_the_self_test(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One may be the prompt's; after two the engine must prove itself, and serves on if it can."""
    async with running(Board(fault="nan-at-3")) as board:
        await ready(board)
        for _ in range(2):
            _, finish = await read(board.scheduler.submit(request(max_tokens=30)))
            assert names(finish) == ["npu", "cpu"]
        assert "self_test_asked" in capsys.readouterr().out
        assert (board.npu.health().state, board.npu.health().restarts) == ("ready", 0)


async def test_an_engine_that_begins_to_repeat_itself_is_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A jump of the repeated share asks for the self test; one that fails it is restarted, and
    its streams go on elsewhere."""
    words = ["3 of the latest 5 streams repeat themselves"]
    monkeypatch.setattr(Repetition, "jumped", lambda self: words.pop() if words else None)
    async with running(Board(fault="wrong-probe")) as board:
        await ready(board)
        tokens, finish = await read(board.scheduler.submit(request(max_tokens=60)))
        assert (tokens, finish.reason, names(finish)) == (60, "length", ["npu", "cpu"])
        await until(lambda: board.npu.health().restarts == 1)


async def test_streams_longer_than_the_small_model_holds_go_elsewhere() -> None:
    """A rung with a shorter context serves what fits it and cuts nothing short."""
    board = Board(npu_mib=(1000, 600))
    full, small = board.npu.keeper.rungs
    short = msgspec.structs.replace(small.launch, context_tokens=50)
    board.npu.keeper.rungs = (full, dataclasses.replace(small, launch=short))
    async with running(board):
        await ready(board)
        await until(lambda: board.cpu.health().state == "ready")
        board.npu.keeper.tell(Failed("memory"))
        await until(lambda: board.npu.health().state == "ready" and board.npu.health().slots == 4)
        _, fits = await read(board.scheduler.submit(request("a", prompt=10, max_tokens=40)))
        _, long = await read(board.scheduler.submit(request("b", prompt=10, max_tokens=41)))
    assert (names(fits), fits.reason) == (["npu"], "length")
    assert (names(long), long.reason, long.usage.completion_tokens) == (
        ["npu", "cpu"],
        "length",
        41,
    )


async def test_nobody_climbs_while_memory_is_short() -> None:
    """Stable or not: while tasks wait for memory the smaller configuration stays."""
    async with running(Board(npu_mib=(1000, 600))) as board:
        await ready(board)
        board.npu.press("little memory")
        await until(lambda: board.npu.health().state == "ready" and board.npu.health().slots == 4)
        board.memory.full_percent = 30.0
        await asyncio.sleep(1.0)  # twice the stable time
        assert board.npu.health().slots == 4
        board.memory.full_percent = 0.0
        await until(lambda: board.npu.health().slots == 8)
