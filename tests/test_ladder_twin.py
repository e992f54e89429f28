"""The ladder on the simulated board: the real daemon, real model, and faults to order."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from daemon import Daemon, daemon
from test_twin_daemon import TWIN, wait_for_npu

from edged.twin import faults

pytestmark = pytest.mark.model

QUICK = (
    *("npu.dtype=fp32", "engines.restart_backoff_s=0.1", "engines.fallback_idle_s=2"),
    *("queue.max_requests=64", "recover.climb_after_s=600"),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with daemon(*TWIN, *QUICK, "engines.fallback=warm") as running:
        wait_for_npu(running)
        yield running


def order(running: Daemon, *words: str) -> None:
    """As `edged twin` on the command line."""
    assert faults.main(["--twin", str(running.folder / "state" / "twin"), *words]) == 0


def engine(running: Daemon, name: str = "npu") -> dict[str, Any]:
    engines = running.get("/edged/v1/status")["engines"]
    found: dict[str, Any] = next(engine for engine in engines if engine["name"] == name)
    return found


def ask(running: Daemon, tokens: int, after: Callable[[], None] = lambda: None) -> Any:
    """One streamed request; `after` its first token something happens. The last chunk."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as api:
        stream = iter(
            api.completions.create(
                model="",
                prompt="Once",
                max_tokens=tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        first = next(stream)
        after()
        return [first, *stream][-1]


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert condition()


def wrote(chunk: Any) -> list[str]:
    return [span["name"] for span in chunk.model_extra["edged"]["engines"]]


@pytest.mark.parametrize(("fault", "cause"), [("aicore-fault", "fatal"), ("lost", "lost")])
def test_a_fatal_code_moves_the_stream_and_keeps_the_rung(
    served: Daemon, fault: str, cause: str
) -> None:
    """An AI Core exception or a lost device: the CPU writes the rest, a new worker serves the
    next request with all its slots."""
    wait_for_npu(served)
    before = engine(served)["restarts"]
    last = ask(served, 40, lambda: order(served, fault))
    assert (last.choices[0].finish_reason, wrote(last)) == ("length", ["npu", "cpu"])
    until(lambda: engine(served)["restarts"] > before)
    assert re.search(rf"cause\W+{cause}\b", served.log)
    wait_for_npu(served)
    assert engine(served)["rung"] == "8 slots"
    assert wrote(ask(served, 2)) == ["npu"]


def test_lack_of_device_memory_costs_a_rung_and_no_stream(served: Daemon) -> None:
    """Out of memory in decode, more often than a step is repeated: the stream goes on with the
    CPU, the NPU returns with half the slots; status and metrics tell it."""
    wait_for_npu(served)
    last = ask(served, 40, lambda: order(served, "oom", "--at", "step", "--times", "3"))
    assert (last.choices[0].finish_reason, wrote(last)) == ("length", ["npu", "cpu"])
    until(lambda: engine(served)["rung"] == "4 slots")
    wait_for_npu(served)
    npu = engine(served)
    assert npu["slots"] == 4
    assert npu["rung_left"].startswith("memory: memory: decode: ")
    assert 0 < npu["next_climb_s"] <= 600
    assert "MiB are available" in npu["memory"]
    metrics = served.get("/metrics")
    assert 'edged_engine_rung{engine="npu"} 1.0' in metrics
    assert 'edged_ladder_moves_total{engine="npu",reason="memory"} 1.0' in metrics
    assert 'edged_stream_moves_total{from="npu",reason="engine_fault",to="cpu"}' in metrics


def test_a_killed_daemon_leaves_no_worker_on_the_device() -> None:
    """kill -9 of the daemon in mid-stream and a restart at once: the workers of the first are
    gone before the second has the device, and it serves from the NPU."""
    with daemon(*TWIN, *QUICK, "engines.fallback=lazy") as first:
        wait_for_npu(first)
        workers = first.workers()
        with contextlib.suppress(openai.APIError, openai.APIConnectionError, Exception):
            ask(first, 200, lambda: first.process.send_signal(signal.SIGKILL))
        state = first.folder / "state"
        with daemon(*TWIN, *QUICK, "engines.fallback=lazy", f"state_dir={state}") as second:
            wait_for_npu(second)
            assert not [worker for worker in workers if alive(worker)]
            assert len(second.workers()) == 1
            assert engine(second)["restarts"] == 0
            assert wrote(ask(second, 2)) == ["npu"]


def alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


@contextlib.contextmanager
def small_board(proc: Path, free_mib: int) -> Iterator[list[Daemon]]:
    """A procfs whose MemAvailable falls by what the workers of the listed daemons take."""
    daemons: list[Daemon] = []
    over = threading.Event()

    def write() -> None:
        taken = 0
        for worker in [worker for running in daemons for worker in running.workers()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                taken += worker.memory_info().rss >> 20
        text = f"MemTotal: 8388608 kB\nMemAvailable: {max(0, free_mib - taken) * 1024} kB\n"
        (proc / "new").write_text(text)
        (proc / "new").replace(proc / "meminfo")

    def keep() -> None:
        while not over.wait(0.1):
            write()

    proc.mkdir()
    write()
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield daemons
    finally:
        over.set()
        thread.join()


def test_on_an_8_gb_board_the_engines_take_turns(tmp_path: Path) -> None:
    """Room for one model: the CPU engine waits parked. The NPU dies: the CPU engine is loaded and
    the stream waits for it and goes on; the NPU does not load beside it, and is back when it is
    idle. One restart of each, no loop."""
    sets = ("engines.chain=['npu','cpu']", "npu.twin=310b4-8gb", "npu.context_gears=[512]", *QUICK)
    with (
        small_board(tmp_path / "proc", free_mib=1700) as daemons,
        daemon(*sets, f"recover.proc={tmp_path / 'proc'}") as running,
    ):
        daemons.append(running)
        wait_for_npu(running)
        assert (engine(running, "cpu")["state"], engine(running, "cpu")["standby"]) == ("off", True)
        assert running.get("/edged/v1/status")["mode"] == "normal"
        npu = next(w for w in running.workers() if "npu" in w.cmdline())
        last = ask(running, 60, lambda: npu.send_signal(signal.SIGKILL))
        assert (last.choices[0].finish_reason, wrote(last)) == ("length", ["npu", "cpu"])
        wait_for_npu(running)
        until(lambda: engine(running, "cpu")["standby"])
        assert wrote(ask(running, 2)) == ["npu"]
        assert (engine(running)["restarts"], engine(running, "cpu")["restarts"]) == (1, 0)
