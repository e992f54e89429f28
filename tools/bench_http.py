"""edged against llama.cpp's own HTTP server: same GGUF, threads, slots and context per slot.

Both run all the time, each in its own process; the load comes from a third (loadgen.py), in
interleaved pairs, so that both see the same machine. Prompts are distinct: no cache decides.
Ends with one line `RESULT ` + JSON; every ratio is edged / llama.cpp.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_sides import Side, edged_side, fetch, llama_side

from edged import models
from edged.machine import default_state_dir

TOOLS = Path(__file__).parent
PROMPTS_TOKENS = {"short": 16, "long": 400}
WORDS = """river stone cloud light house garden music winter summer morning evening water fire
mountain forest ocean street window door table book paper letter number city country people
child mother father friend teacher doctor school market road bridge train ship horse bird fish
tree flower fruit bread milk salt sugar gold silver iron glass wood wall roof field farm island
valley desert storm wind rain snow star moon sun earth machine engine wheel clock phone radio"""


@dataclass(frozen=True)
class Plan:
    clients: tuple[int, ...]
    rounds: int
    requests_per_client: int
    max_tokens: int
    idle_s: float


FULL = Plan((1, 4, 8, 16), rounds=2, requests_per_client=1, max_tokens=64, idle_s=10.0)
QUICK = Plan((1, 4, 8, 16), rounds=1, requests_per_client=1, max_tokens=24, idle_s=3.0)


def main() -> int:
    arguments = parse()
    plan = QUICK if arguments.quick else FULL
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        llama = stack.enter_context(llama_side(arguments))
        edged = stack.enter_context(edged_side(arguments))
        sides = (edged, llama)
        print(f"bench: {arguments.model.name}, {arguments.threads} threads, {plan}", flush=True)
        if load_before > 0.5:
            print(f"bench: load average {load_before:.1f} before the start: expect noise")
        words = single_token_words(llama.base)
        samples = measure(sides, plan, words)
        result = ratios(samples, plan) | footprint(edged, llama, plan.idle_s, samples, words)
    print("RESULT " + json.dumps(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples: about a minute")
    parser.add_argument("--model", type=Path, help="GGUF file; the demo model if not given")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context-tokens", type=int, default=2048, help="per slot")
    arguments = parser.parse_args()
    arguments.model = arguments.model or models.demo_path(default_state_dir())
    if not arguments.model.exists():
        parser.error(f"{arguments.model} is missing; run `edged models fetch demo`")
    return arguments


# --- the load ---------------------------------------------------------------------------------


def single_token_words(base: str) -> list[int]:
    """Ids of words that are one token each, so that a prompt's length is exact."""
    found = [fetch(f"{base}/tokenize", {"content": f" {word}"})["tokens"] for word in WORDS.split()]
    return [ids[0] for ids in found if len(ids) == 1]


Samples = dict[tuple[str, int, str], list[dict[str, Any]]]  # (prompts, clients, side) -> rounds


def measure(sides: tuple[Side, ...], plan: Plan, words: list[int]) -> Samples:
    """Interleaved pairs; the side that begins changes every round. Each pair shares prompts."""
    rng = random.Random(1)
    samples: Samples = defaultdict(list)
    for side in sides:  # warm-up: shapes, pages, connections
        for clients in (1, max(plan.clients)):
            load(side, clients, prompts(rng, words, 16, clients), 8)
    for kind, prompt_tokens in PROMPTS_TOKENS.items():
        for clients in plan.clients:
            for number in range(plan.rounds):
                count = clients * plan.requests_per_client
                asked = prompts(rng, words, prompt_tokens, max(count, 3))
                for side in sides if number % 2 == 0 else reversed(sides):
                    found = load(side, clients, asked, plan.max_tokens)
                    samples[kind, clients, side.name].append(found)
            show(kind, clients, samples)
    return samples


def prompts(rng: random.Random, words: list[int], tokens: int, count: int) -> list[list[int]]:
    return [rng.choices(words, k=tokens) for _ in range(count)]


def load(side: Side, clients: int, asked: list[list[int]], max_tokens: int) -> dict[str, Any]:
    job = {"base": side.base, "model": side.model, "clients": clients}
    job |= {"prompts": asked, "max_tokens": max_tokens}
    done = subprocess.run(
        [sys.executable, str(TOOLS / "loadgen.py")],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    if found["errors"]:
        raise SystemExit(f"bench: {side.name} failed: {found['errors'][:3]}")
    if found["completion_tokens"] != len(asked) * max_tokens:
        raise SystemExit(f"bench: {side.name} answered {found['completion_tokens']} tokens")
    return found


# --- the figures ------------------------------------------------------------------------------


def figures(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """tokens_per_s: median over rounds. Latencies in ms, over all samples of all rounds."""
    first = [value for found in rounds for value in found["first_s"]]
    gaps = [value for found in rounds for value in found["gaps_s"]]
    speeds = [found["completion_tokens"] / found["wall_s"] for found in rounds]
    return {
        "tokens_per_s": statistics.median(speeds),
        "ttft_p50": percentile(first, 50) * 1e3,
        "ttft_p99": percentile(first, 99) * 1e3,
        "itl_p50": percentile(gaps, 50) * 1e3,
        "itl_p99": percentile(gaps, 99) * 1e3,
    }


def percentile(values: list[float], percent: int) -> float:
    """The nearest sample at or above; 0 without samples."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def compare(kind: str, clients: int, samples: Samples) -> dict[str, tuple[float, float, float]]:
    """Per figure: edged, llama.cpp, ratio. Speed is compared pair by pair."""
    ours, theirs = samples[kind, clients, "edged"], samples[kind, clients, "llama.cpp"]
    a, b = figures(ours), figures(theirs)
    found = {name: (a[name], b[name], a[name] / b[name] if b[name] else 0.0) for name in a}
    pairs = [t["wall_s"] / o["wall_s"] for o, t in zip(ours, theirs, strict=True)]
    found["tokens_per_s"] = (*found["tokens_per_s"][:2], statistics.median(pairs))
    return found


def show(kind: str, clients: int, samples: Samples) -> None:
    for name, (ours, theirs, ratio) in compare(kind, clients, samples).items():
        label = f"{PROMPTS_TOKENS[kind]:>4} tokens, {clients:>2} clients  {name:<13}"
        unit = "" if name == "tokens_per_s" else "ms"
        print(f"{label} edged {ours:9.1f} {unit:2}  llama.cpp {theirs:9.1f} {unit:2}  {ratio:6.2f}")
    sys.stdout.flush()


def ratios(samples: Samples, plan: Plan) -> dict[str, float]:
    """Names without a prompt length are of short prompts; ttft_p50_ratio_400 is of one client."""
    found: dict[str, float] = {}
    for clients in plan.clients:
        for kind, mark in (("short", ""), ("long", "_400")):
            for name, (_, _, ratio) in compare(kind, clients, samples).items():
                found[f"{name}_ratio{mark}_{clients}"] = round(ratio, 3)
    found["ttft_p50_ratio_400"] = found[f"ttft_p50_ratio_400_{plan.clients[0]}"]
    return found


def footprint(
    edged: Side, llama: Side, idle_s: float, samples: Samples, words: list[int]
) -> dict[str, float]:
    """Resident memory (MB) after at least 100 requests, idle CPU (% of one core)."""
    asked = sum(len(f["first_s"]) for key, r in samples.items() if key[2] == "edged" for f in r)
    if asked < 100:
        rng = random.Random(2)
        load(edged, 8, prompts(rng, words, 4, 100 - asked), 1)
    workers = edged.process.children(recursive=True)
    time.sleep(1.0)
    daemon_percent, worker_percent = idle_percent([edged.process], workers, idle_s)
    found = {
        "daemon_rss_mb": edged.process.memory_info().rss / 1e6,
        "worker_rss_mb": sum(worker.memory_info().rss for worker in workers) / 1e6,
        "llama_rss_mb": llama.process.memory_info().rss / 1e6,
        "idle_cpu_percent": daemon_percent + worker_percent,
        "idle_cpu_percent_daemon": daemon_percent,
    }
    for name, value in found.items():
        print(f"{name:<24} {value:8.2f}")
    return {name: round(value, 2) for name, value in found.items()}


def idle_percent(
    daemon: list[psutil.Process], workers: list[psutil.Process], seconds: float
) -> tuple[float, float]:
    def used_s(processes: list[psutil.Process]) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used_s(daemon), used_s(workers)
    began = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began
    return (
        (used_s(daemon) - before[0]) / took_s * 100,
        (used_s(workers) - before[1]) / took_s * 100,
    )


if __name__ == "__main__":
    sys.exit(main())
