"""From configuration to engines: which worker, which model, which rungs. Starts nothing."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from edged.engine.device_lock import DeviceLock
from edged.engine.fallback import Fallback
from edged.engine.gate import Gate
from edged.engine.life import Means
from edged.engine.overseer import Overseer, Watch
from edged.engine.rungs import make_rungs
from edged.engine.worker_engine import WorkerEngine
from edged.ladder import Rules
from edged.memory import BESIDE_BYTES, SPARE_BYTES, Admission, Memory
from edged.settings import Config


def make_engines(
    config: Config,
    model: str,
    model_dirs: Mapping[str, Path],
    context_tokens: int,
    twin: Path,
    device_free_bytes: Callable[[], int | None] = lambda: None,
    foreign: Mapping[str, tuple[str, int]] | None = None,
) -> tuple[WorkerEngine, ...]:
    """Our own engines of the chain, in order. model_dirs: by engine name; twin: state folder of a
    simulated board, which the NPU's worker opens in place of a device when npu.twin is set;
    device_free_bytes: by the NPU's own count, where the daemon knows it; foreign: (model, context
    in tokens) of engines with another tokenizer."""
    memory = Memory(Path(config.recover.proc))
    admission = Admission(memory)
    made: dict[str, WorkerEngine] = {}
    for name in [name for name in config.engines.chain if name in ("npu", "cpu")]:
        named, context = (foreign or {}).get(name, (model, context_tokens))
        rungs = make_rungs(name, config, model_dirs[name], context)
        means, gate = Means(memory=memory), Gate(name, admission)
        if name == "npu":
            environ = {"EDGED_TWIN": str(twin)} if config.npu.twin else {}
            lock = DeviceLock(Path(config.state_dir) / "npu.lock")
            means = Means(environ=environ, memory=memory, lock=lock)
            gate = Gate(name, admission, device_free_bytes)
        elif not config.cpu.threads:
            means = Means(memory=memory, threads=functools.partial(_cpu_threads, made))
        last = name == config.engines.chain[-1]
        rules = _rules(config, len(rungs), last)
        made[name] = WorkerEngine(name, named, rungs, rules, means, gate)
    if (why := _waits(config, made, memory)) and "cpu" in made:
        made["cpu"].keeper.park(why)
    return tuple(made.values())


def make_overseer(config: Config, engines: tuple[WorkerEngine, ...]) -> Overseer:
    """Who watches over these engines."""
    recover, fallback = config.recover, None
    if [engine.name for engine in engines] == ["npu", "cpu"]:
        lazy = config.engines.fallback != "warm"
        fallback = Fallback(engines[1], engines[:1], config.engines.fallback_idle_s, lazy)
    watch = Watch(
        recover.memory_floor_mib << 20,
        recover.pressure_some_percent,
        recover.pressure_full_percent,
    )
    return Overseer(engines, fallback, Memory(Path(recover.proc)), watch)


def _rules(config: Config, rungs: int, last: bool) -> Rules:
    """last: of the chain; nobody serves while it is off, so it tries as often as it may."""
    engines, recover = config.engines, config.recover
    return Rules(
        rungs=rungs,
        budget=engines.restart_budget,
        hour_budget=max(12, 2 * engines.restart_budget),
        window_s=engines.restart_window_s,
        backoff_s=engines.restart_backoff_s,
        backoff_max_s=engines.restart_backoff_max_s,
        climb_after_s=recover.climb_after_s,
        climb_max_s=max(recover.climb_after_s, recover.climb_max_s),
        off_max_s=engines.restart_window_s if last else recover.off_max_s,
    )


def _cpu_threads(engines: Mapping[str, WorkerEngine]) -> int:
    """One core is the NPU's host side, while that one runs or is about to; 0 = all of them."""
    beside = "npu" in engines and engines["npu"].health().state in ("starting", "ready")
    return max(1, len(os.sched_getaffinity(0)) - 1) if beside else 0


def _waits(config: Config, engines: Mapping[str, WorkerEngine], memory: Memory) -> str:
    """Why the CPU engine is not loaded before it is needed; "" = it is."""
    fallback = config.engines.fallback
    names = list(engines)
    if "cpu" not in names[1:] or fallback == "warm":
        return ""
    if fallback == "lazy":
        return (
            "waits until the NPU fails (engines.fallback is lazy); streams then wait for its load"
        )
    npu, cpu = (engines[name].keeper.rungs[0].needs for name in ("npu", "cpu"))
    available = memory.available_bytes()
    if npu is None or cpu is None or available is None:
        return ""
    wanted = npu.total_bytes + cpu.total_bytes - 2 * SPARE_BYTES + BESIDE_BYTES
    if wanted <= available:
        return ""
    return (
        f"waits until the NPU fails: both models and 1 GiB to spare take {wanted >> 20} MiB, "
        f"{available >> 20} MiB are available; streams then wait for its load"
    )
