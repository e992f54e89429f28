"""The NPU path's step loop on the twin at native pace against onnxruntime alone.

The real worker as a child process over the wire; interleaved pairs in one run, medians. Besides:
batching gain, prefix reuse, allocations, host time per step, start times, the board model.
Ends with one line `RESULT ` + JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_npu_sides import Bare, Block, Worker

from edged import models
from edged.machine import default_state_dir
from edged.twin import boards, om, state
from edged.twin.acl import Library
from edged.twin.state import TwinState
from edged.worker.om import OM_FILE
from edged.worker.om.arena import Arena
from edged.worker.om.binding import Device

BOARD = "310b4"
BATCHES = (1, 4, 8)
SLOTS = max(BATCHES)
CHUNK_TOKENS = 64
CONTEXT_TOKENS = 512
PREFIX_CONTEXT_TOKENS = 1024  # the prefix, a suffix and an answer do not fit into 512
NOISE = 0.03  # a loop ratio further above 1 is not to be believed
PREFIX_TOKENS, SUFFIX_TOKENS = 500, 24
GEARS = [
    *("--batch-gears", ",".join(map(str, BATCHES))),
    *("--context-gears", f"{CONTEXT_TOKENS},{PREFIX_CONTEXT_TOKENS}"),
    *("--prefill-chunk", str(CHUNK_TOKENS)),
]


@dataclass(frozen=True)
class Plan:
    rounds: int
    steps: int
    prefixes: int
    requests: int


FULL = Plan(rounds=12, steps=16, prefixes=5, requests=100)
QUICK = Plan(rounds=3, steps=8, prefixes=2, requests=16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--model", type=Path, help="GGUF file; the demo model if not given")
    parser.add_argument("--state-dir", type=Path, default=default_state_dir())
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    model = arguments.model or models.demo_path(arguments.state_dir)
    if os.getloadavg()[0] > 0.5:
        print("bench: the machine is not idle; only the ratios mean anything", flush=True)
    say: Callable[[str], None] = lambda line: print(f"bench: {line}", flush=True)  # noqa: E731
    folder = models.ensure_exported(model, arguments.state_dir, "fp32", say, "twin", GEARS)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as scratch:
        found = run(folder, Path(scratch), arguments.threads, QUICK if arguments.quick else FULL)
    for name, value in found.items():
        print(f"{name:30s} {value:10.4f}")
    if any(found[f"loop_ratio_{batch}"] > 1 + NOISE for batch in BATCHES):
        print("bench: no worker beats the bare session: too much noise, or the sides are not alike")
    print("RESULT " + json.dumps(found))
    return 0


def run(folder: Path, scratch: Path, threads: int, plan: Plan) -> dict[str, float]:
    about: dict[str, Any] = json.loads((folder / models.MANIFEST_FILE).read_text(encoding="utf-8"))
    about["weight_bytes"] = (folder / OM_FILE).stat().st_size
    bare = Bare(folder / OM_FILE, threads, CONTEXT_TOKENS, BATCHES)
    twin = state.create(scratch / "twin", BOARD, {"threads": float(threads)})
    worker = Worker(folder, twin, SLOTS, CHUNK_TOKENS, scratch / "worker.log")
    rng = random.Random(1)
    try:
        found = loops(worker, bare, twin, about, plan)
        found |= allocations(worker, rng, about["vocab"], plan.requests)
        found |= prefix(worker, rng, about["vocab"], plan.prefixes)  # last: S stays at 1024
        found |= worker.times()
    finally:
        worker.close()
        twin.close()
    found["arena_alloc_ratio"] = arena_ratio(bare.header, scratch / "arena", plan.rounds * 10)
    return {name: round(value, 5) for name, value in found.items()}


# --- the step loop ------------------------------------------------------------------------------


def loops(
    worker: Worker, bare: Bare, twin: TwinState, about: dict[str, Any], plan: Plan
) -> dict[str, float]:
    """Each round's step times. The bare session runs before and after the worker, so that what
    drifts with the rest of the machine meets both alike."""
    blocks: dict[int, list[Block]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)
    for turn in range(plan.rounds + 1):  # the first one warms up
        for batch in BATCHES:
            before = bare.step_s(batch, plan.steps // 2)
            block = worker.decode(batch, plan.steps)
            after = bare.step_s(batch, plan.steps // 2)
            if turn:
                blocks[batch].append(block)
                alone[batch].append(statistics.median(before + after))
    return loop_figures(blocks, alone) | {
        "device_model_error_percent": max(
            abs(b.device_s / board_step_s(twin, about, batch) - 1) * 100
            for batch, of_batch in blocks.items()
            for b in of_batch
        )
    }


def loop_figures(blocks: dict[int, list[Block]], alone: dict[int, list[float]]) -> dict[str, float]:
    """Medians of the ratios of each round's pair, and of the worker's own figures."""
    found: dict[str, float] = {}
    steps = {b: [statistics.median(x.period_s) for x in of_b] for b, of_b in blocks.items()}
    for batch, took in steps.items():
        ratios = [a / t for a, t in zip(alone[batch], took, strict=True)]
        found[f"loop_ratio_{batch}"] = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios)
        found[f"loop_ratio_{batch}_quartiles_apart"] = high - low
        found[f"tokens_per_s_{batch}"] = batch / statistics.median(took)
        host_s = statistics.median(block.host_s for block in blocks[batch])
        found[f"host_ms_per_step_{batch}"] = host_s * 1e3
        found[f"device_ms_per_step_{batch}"] = blocks[batch][-1].device_s * 1e3
    for batch in BATCHES[1:]:
        gains = [batch * one / many for one, many in zip(steps[1], steps[batch], strict=True)]
        found[f"batch_gain_{batch}"] = statistics.median(gains)
    return found


def board_step_s(twin: TwinState, about: dict[str, Any], batch: int) -> float:
    """Of a decode step, worked out anew from model.json and the board's parameter file."""
    board = boards.load(BOARD)
    clock_ratio = board.max_mhz / twin.sample(time.monotonic()).clock_mhz
    weight_bytes = about["weight_bytes"]
    row_bytes = 2 * about["layers"] * about["kv_heads"] * about["head_dim"] * 4
    moved = weight_bytes + batch * CONTEXT_TOKENS * row_bytes
    rate = board.memory.bandwidth_bytes_per_s * board.memory.efficiency
    memory_s = moved / rate * clock_ratio**board.memory.clock_exponent
    flops = board.compute.peak_flops * board.compute.decode_efficiency
    compute_s = batch * 2 * weight_bytes / 4 / flops * clock_ratio
    return float(max(memory_s, compute_s) + board.compute.host_s)


# --- the rest ------------------------------------------------------------------------------------


def allocations(worker: Worker, rng: random.Random, vocab: int, count: int) -> dict[str, float]:
    """By the twin's own counter, over requests of random length."""
    asked = [(ids(rng, vocab, rng.randint(1, 120)), rng.randint(1, 12)) for _ in range(count)]
    made = worker.serve(asked, SLOTS)
    return {"device_allocations_per_request": made / count}


def prefix(worker: Worker, rng: random.Random, vocab: int, count: int) -> dict[str, float]:
    """First token of a prompt that shares its system prompt with one before, against that one."""
    cold: list[float] = []
    warm: list[float] = []
    for turn in range(count + 1):  # the first one grows the context and prepares the shapes
        system = ids(rng, vocab, PREFIX_TOKENS)
        for took in (cold, warm):
            took_s = worker.first_token_s(system + ids(rng, vocab, SUFFIX_TOKENS))
            if turn:
                took.append(took_s)
    return {
        "prefix_ttft_ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
        "cold_ttft_ms": statistics.median(cold) * 1e3,
        "prefix_ttft_ms": statistics.median(warm) * 1e3,
    }


def ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(vocab // 10, vocab - 2) for _ in range(count)]


def arena_ratio(header: om.Header, folder: Path, rounds: int) -> float:
    """Buffers for all that a batch-8 step reads and writes besides the cache: one arena carved,
    against one acl.rt.malloc for each."""
    gear = max((g for g in header.gears if g["T"] == 1), key=lambda g: g["B"] * g["S"])
    sizes = {
        tensor.name: int(np.prod(tensor.shape(gear))) * np.dtype(tensor.dtype).itemsize
        for tensor in (*header.inputs, *header.outputs)
        if not tensor.name.startswith("past_k") and not tensor.name.startswith("past_v")
    }
    state.create(folder, BOARD).close()
    device = Device(Library(folder))
    carved: list[float] = []
    single: list[float] = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        arena = Arena(device, sizes)
        _ = [arena.address(name) for name in sizes]
        carved.append(time.perf_counter() - started_s)
        arena.close()
        started_s = time.perf_counter()
        places = [device.malloc(size) for size in sizes.values()]
        single.append(time.perf_counter() - started_s)
        for place in places:
            device.free(place)
    device.close()
    return statistics.median(carved) / statistics.median(single)


if __name__ == "__main__":
    sys.exit(main())
