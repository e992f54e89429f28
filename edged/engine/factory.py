"""From configuration to engines: which worker, which model, how many slots. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edged import wire
from edged.engine.restarts import RestartPolicy
from edged.engine.worker_engine import WorkerEngine
from edged.settings import Config


def make_engines(
    config: Config,
    model: str,
    model_dirs: Mapping[str, Path],
    context_tokens: int,
    twin: Path,
    foreign: Mapping[str, tuple[str, int]] | None = None,
) -> tuple[WorkerEngine, ...]:
    """The workers of the chain, in order. model_dirs: by engine name; twin: state folder of a
    simulated board, which the NPU's worker opens in place of a device when npu.twin is set.
    foreign: (model, context in tokens) of engines with another tokenizer."""
    engines = config.engines
    restarts = RestartPolicy(
        engines.restart_budget,
        engines.restart_window_s,
        engines.restart_backoff_s,
        engines.restart_backoff_max_s,
    )
    named = {name: (model, context_tokens) for name in model_dirs} | dict(foreign or {})
    environ = {"npu": {"EDGED_TWIN": str(twin)} if config.npu.twin else {}}
    return tuple(
        WorkerEngine(
            name,
            named[name][0],
            _launch(name, config, model_dirs[name], named[name][1]),
            restarts,
            environ=environ.get(name),
        )
        for name in engines.chain
        if name in model_dirs
    )


def _launch(name: str, config: Config, model_dir: Path, context_tokens: int) -> wire.Launch:
    section = config.npu if name == "npu" else config.cpu
    return wire.Launch(
        engine=name,
        model_dir=str(model_dir),
        slots=section.slots,
        context_tokens=context_tokens,
        threads=config.cpu.threads,
        prefill_chunk=min(section.prefill_chunk, context_tokens),
    )
