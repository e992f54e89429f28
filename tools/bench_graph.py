"""The exported graph under the worker's executor against llama.cpp, without any server around.

Interleaved pairs in one process: decode steps at batch 1, 4 and 8, and the prefill of one
400-token prompt. Ends with one line `RESULT ` + JSON; ratios are edged / llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

from edged import models
from edged.machine import default_state_dir
from edged.settings import Cpu
from edged.worker.contract import read_spec
from edged.worker.executor import empty_batch
from edged.worker.ort import OrtExecutor

BATCHES = (1, 4, 8)
SLOTS = max(BATCHES)
CONTEXT_TOKENS = 1024
CHUNK_TOKENS = Cpu().prefill_chunk
PROMPT_TOKENS = 400
START_TOKENS = 40  # in every cache before the measured decode steps


@dataclass(frozen=True)
class Plan:
    rounds: int
    steps: int


FULL, QUICK = Plan(rounds=6, steps=48), Plan(rounds=2, steps=16)


class Edged:
    """One model directory under the CPU engine's own executor."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._executor = OrtExecutor(read_spec(folder, CONTEXT_TOKENS), SLOTS, threads)

    def decode_tokens_per_s(self, batch: int, steps: int) -> float:
        self._fit(START_TOKENS + steps)
        took = [self._step(batch, 1, START_TOKENS + i) for i in range(steps)]
        return batch / statistics.median(took)

    def prefill_s(self, tokens: int) -> float:
        self._fit(tokens)
        starts = range(0, tokens, CHUNK_TOKENS)
        return sum(self._step(1, min(CHUNK_TOKENS, tokens - s), s) for s in starts)

    def _fit(self, tokens: int) -> None:
        context = next(s for s in self._executor.gears.context if s >= tokens)
        if context != self._executor.context:
            self._executor.repack(context, [0] * SLOTS)

    def _step(self, batch: int, tokens: int, past: int) -> float:
        """Seconds of one step."""
        made = empty_batch(0, batch, tokens)
        made.input_ids[:] = np.arange(tokens) + 1000
        made.position_ids[:] += past
        made.past_len[:] = past
        made.logit_idx[:] += tokens - 1
        made.fresh[:] = [tokens] * batch
        started_s = time.perf_counter()
        self._executor.run(made)
        return time.perf_counter() - started_s


class Llama:
    """llama.cpp at its defaults, with as many slots."""

    def __init__(self, model: Path, threads: int) -> None:
        chosen = xllamacpp.CommonParams()
        chosen.model.path = str(model)
        chosen.port = 0
        chosen.ui = False
        chosen.verbosity = 0
        chosen.n_parallel = SLOTS
        chosen.n_ctx = SLOTS * CONTEXT_TOKENS
        chosen.kv_unified = False
        chosen.cache_ram_mib = 0
        chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(chosen)

    def decode_tokens_per_s(self, batch: int, steps: int) -> float:
        """Sum over the slots of what each measured from its first token on."""
        timings: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda: timings.append(self._run(START_TOKENS, steps)))
            for _ in range(batch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(float(found["predicted_per_second"]) for found in timings)

    def prefill_s(self, tokens: int) -> float:
        return float(self._run(tokens, 1)["prompt_ms"]) / 1e3

    def _run(self, prompt_tokens: int, count: int) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.handle_completions(
            {
                "prompt": list(range(1000, 1000 + prompt_tokens)),
                "max_tokens": count,
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        if "error" in answer:
            raise SystemExit(f"bench: llama.cpp: {answer['error']}")
        found: dict[str, Any] = answer["timings"]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", type=Path, default=models.demo_path(default_state_dir()))
    parser.add_argument("--dtypes", default="auto,int8", help="exports to measure")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    if os.getloadavg()[0] > 0.5:
        print("bench: the machine is not idle; only the ratios mean anything", flush=True)
    sides: dict[str, Edged | Llama] = {"llama.cpp": Llama(arguments.model, arguments.threads)}
    for dtype in arguments.dtypes.split(","):
        folder = models.ensure_exported(arguments.model, default_state_dir(), dtype)
        sides[dtype] = Edged(folder, arguments.threads)
    figures = measure(sides, plan)
    report(figures, list(sides))
    print("RESULT " + json.dumps(results(figures, list(sides))))
    return 0


def measure(sides: dict[str, Edged | Llama], plan: Plan) -> dict[tuple[str, str], list[float]]:
    """{(side, figure): one value per round}; the first round warms up and is dropped."""
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(plan.rounds + 1):
        for figure, run in tasks(plan):
            for name, side in sides.items():
                value = run(side)
                if turn:
                    figures[name, figure].append(value)
    return figures


def tasks(plan: Plan) -> list[tuple[str, Callable[[Edged | Llama], float]]]:
    found: list[tuple[str, Callable[[Edged | Llama], float]]] = []
    for batch in BATCHES:
        run = lambda side, batch=batch: side.decode_tokens_per_s(batch, plan.steps)  # noqa: E731
        found.append((f"tokens_per_s_{batch}", run))
    found.append(("prefill_s_400", lambda side: side.prefill_s(PROMPT_TOKENS)))
    return found


def report(figures: dict[tuple[str, str], list[float]], names: list[str]) -> None:
    for figure in dict.fromkeys(figure for _, figure in figures):
        values = "  ".join(f"{n} {statistics.median(figures[n, figure]):8.2f}" for n in names)
        print(f"{figure:16s} {values}", flush=True)


def results(figures: dict[tuple[str, str], list[float]], names: list[str]) -> dict[str, float]:
    """Medians of each side, and medians of the ratios of each round's pair."""
    found: dict[str, float] = {}
    for figure in dict.fromkeys(figure for _, figure in figures):
        base = figures["llama.cpp", figure]
        for name in names:
            values = figures[name, figure]
            key = name.replace(".", "_")
            found[f"{figure}_{key}"] = round(statistics.median(values), 4)
            if name != "llama.cpp":
                pairs = [ours / theirs for ours, theirs in zip(values, base, strict=True)]
                found[f"{figure}_ratio_{key}"] = round(statistics.median(pairs), 3)
    return found


if __name__ == "__main__":
    sys.exit(main())
