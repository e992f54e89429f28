"""How long a stream stands still when its engine dies, and how soon all is as before.

    .venv/bin/python tools/bench_carryover.py [--quick] [--soak ROUNDS]

The real daemon with SmolLM2 on the simulated NPU (native pace) and the CPU engine, all on this
machine's cores. Ends with one line `RESULT ` and a JSON object; times are seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from chaos.clients import ANSWER_S
from chaos.lab import Home, Lab, lab

from edged.machine import default_state_dir
from edged.models import fetch_demo

SOAK = Path(__file__).resolve().parent / "soak.py"
STREAMS, TOKENS = 8, 96
SETS = ("npu.context_gears=[512]", "cpu.dtype=auto")
POLL_S = 0.02


@dataclass
class Timed:
    """When each token of a streamed answer came, and who wrote it."""

    tokens_s: list[float] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)

    def gap_s(self) -> float | None:
        """From the last token of the first engine to the first one of the next."""
        at = int(self.engines[1]["from_token"]) if len(self.engines) > 1 else 0
        if not 0 < at < TOKENS:
            return None
        return self.tokens_s[at] - self.tokens_s[at - 1]

    def between_s(self) -> list[float]:
        """Between tokens of the first engine."""
        own = self.tokens_s[: self.engines[0]["to_token"]]
        return [later - sooner for sooner, later in itertools.pairwise(own)]


async def stream(base: str, index: int, told: Timed) -> None:
    """One answer; logprobs are asked for, because they come with every token, text may not."""
    body = {
        "model": "",
        "prompt": f"Tell a long story about the number {index} and how it came to be",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": index,
        "logprobs": 0,
        "stream": True,
    }
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with (
        aiohttp.ClientSession(base, timeout=timeout) as session,
        session.post("/v1/completions", json=body) as reply,
    ):
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            told.engines = (event.get("edged") or {}).get("engines", told.engines)
            logprobs = event["choices"][0]["logprobs"] or {"tokens": []}
            told.tokens_s += [time.perf_counter()] * len(logprobs["tokens"])
    if len(told.tokens_s) != TOKENS:
        raise RuntimeError(f"an answer of {len(told.tokens_s)} tokens: {told.engines}")


@contextlib.asynccontextmanager
async def streams(made: Lab) -> AsyncIterator[list[Timed]]:
    """Eight answers, all begun on entering, all ended on leaving."""
    told = [Timed() for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(stream(made.daemon.url, index, one)) for index, one in enumerate(told)
    ]
    try:
        while not all(  # noqa: ASYNC110  # polled as coarsely as everything here
            len(one.tokens_s) > 2 or task.done() for one, task in zip(told, tasks, strict=True)
        ):
            await asyncio.sleep(POLL_S)
        yield told
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def when(made: Lab, engine: str, ready: bool) -> float:
    """The moment at which the engine is seen ready, or not any more."""
    while True:
        if ((await made.engine(engine))["state"] == "ready") is ready:
            return time.perf_counter()
        await asyncio.sleep(POLL_S)


async def deaths(made: Lab, rounds: int, rng: random.Random) -> dict[str, Any]:
    """kill -9 of the NPU's worker under eight streams, again and again."""
    gaps_s: list[float] = []
    between_s: list[float] = []
    recovery_s: list[float] = []
    for _ in range(rounds):
        worker = made.worker("npu")
        async with streams(made) as told:
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            killed_s = time.perf_counter()
            worker.kill()
            await when(made, "npu", ready=False)
            recovery_s.append(await when(made, "npu", ready=True) - killed_s)
        gaps_s += [gap_s for one in told if (gap_s := one.gap_s()) is not None]
        between_s += [between for one in told for between in one.between_s()]
        await made.normal()
    gap_s, token_s = statistics.median(gaps_s), statistics.median(between_s)
    restart_s = statistics.median(recovery_s)
    return {
        "gaps": len(gaps_s),
        "gap_p50_s": gap_s,
        "gap_p99_s": quantile(gaps_s, 0.99),
        "between_tokens_p50_s": token_s,
        "gap_in_tokens": gap_s / token_s,
        "recovery_s": restart_s,
        "gap_against_restart": gap_s / restart_s,
    }


async def hangs(made: Lab, rounds: int) -> dict[str, Any]:
    """From the last token before an execute that does not end to the end of its worker."""
    found: list[float] = []
    for _ in range(rounds):
        async with streams(made) as told:
            made.order("hang", "--after", "10")
            seen_s = await when(made, "npu", ready=False)
        for one in told:
            if one.gap_s() is not None:
                found.append(seen_s - one.tokens_s[one.engines[1]["from_token"] - 1])
        await made.normal()
    return {"hang_detect_s": statistics.median(found)}


async def short(made: Lab, session: aiohttp.ClientSession) -> tuple[int, float]:
    """(status, seconds from dispatch to end) of a request for eight tokens."""
    body = {"model": "", "prompt": "The sky is", "max_tokens": 8, "ignore_eos": True}
    async with session.post(f"{made.daemon.url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            return reply.status, 0.0
        timings = answer["edged"]["timings"]
        return 200, (timings["total_ms"] - timings["queue_ms"]) / 1000


async def bursts(made: Lab) -> dict[str, Any]:
    """400 requests at once against as many clients as there are slots."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        calm: list[float] = []
        for warm in range(-2, 12):
            answers = await asyncio.gather(*(short(made, session) for _ in range(STREAMS)))
            calm += [took_s for _, took_s in answers] if warm >= 0 else []
        health_s: list[float] = []
        tasks = [asyncio.create_task(short(made, session)) for _ in range(400)]
        while not all(task.done() for task in tasks):
            asked_s = time.perf_counter()
            await made.get("/healthz")
            health_s.append(time.perf_counter() - asked_s)
            await asyncio.sleep(POLL_S)
        answers = await asyncio.gather(*tasks)
    admitted = [took_s for status, took_s in answers if status == 200]
    return {
        "burst_admitted": len(admitted),
        "burst_refused": sum(status == 429 for status, _ in answers),
        "burst_p99_s": quantile(admitted, 0.99),
        "unloaded_p99_s": quantile(calm, 0.99),
        "burst_against_unloaded": quantile(admitted, 0.99) / quantile(calm, 0.99),
        "health_p99_s": quantile(health_s, 0.99),
    }


def soaked(rounds: int) -> dict[str, Any]:
    """RSS and open files of one daemon over rounds of chaos."""
    command = [sys.executable, str(SOAK), "--rounds", str(rounds), "--seed", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    wanted = ("rss_mib_first", "rss_mib_last", "fds_first", "fds_last", "violations", "trends")
    return {"soak_rounds": rounds} | {name: found.get(name) for name in wanted}


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values the one at `share`, never one beyond the last."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measured(quick: bool) -> dict[str, Any]:
    state_dir = default_state_dir()
    model = fetch_demo(state_dir, print)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        (Path(folder) / "models").symlink_to(state_dir / "models")
        async with lab(Home(Path(folder), model, []), *SETS) as made:
            found = await deaths(made, 2 if quick else 12, random.Random(1))
            print(found, flush=True)
            found |= await hangs(made, 1 if quick else 3)
            print(found, flush=True)
            return found | await bursts(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, and a soak of three")
    parser.add_argument("--soak", type=int, default=20, help="rounds of it (default 20, 0 = none)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no process is left behind
    found: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        found = asyncio.run(measured(args.quick))
        if args.soak:
            found |= soaked(min(3, args.soak) if args.quick else args.soak)
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    print("RESULT " + json.dumps(shown))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
