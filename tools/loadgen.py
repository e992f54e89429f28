"""A load of streaming completions in a process of its own: JSON job on stdin, JSON samples out.

Job: {"base", "model", "clients", "prompts": [[token id, ...], ...], "max_tokens"}. Each client
sends its next prompt when its last answer has ended. Knows nothing of who is measured.
Times are seconds; nothing is parsed until the load is over, so that parsing delays nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S = 600.0


@dataclass
class Exchange:
    """One request: when it was sent, when each piece of the answer came."""

    sent_s: float
    status: str = "no answer"
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


async def load(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job; see summary() for what comes back."""
    waiting = deque(enumerate(job["prompts"]))
    exchanges: list[Exchange] = []
    # A connection per request: llama.cpp's server closes one after a stream without saying so.
    connector = aiohttp.TCPConnector(limit=job["clients"], force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(job["base"], connector=connector, timeout=timeout) as session:

        async def client() -> None:
            while waiting:
                seed, prompt = waiting.popleft()
                exchanges.append(exchange := Exchange(time.perf_counter()))
                await ask(session, body_of(job, seed, prompt), exchange)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(job["clients"])))
        wall_s = time.perf_counter() - began
    return summary(exchanges, wall_s)


def body_of(job: dict[str, Any], seed: int, prompt: list[int]) -> dict[str, Any]:
    """The same request for every server; ignore_eos makes all answers equally long."""
    return {
        "model": job["model"],
        "prompt": prompt,
        "max_tokens": job["max_tokens"],
        "ignore_eos": True,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], exchange: Exchange) -> None:
    try:
        async with session.post("/v1/completions", json=body) as reply:
            exchange.status = str(reply.status)
            async for line in reply.content:
                if line.startswith(b"data: "):
                    exchange.pieces.append((time.perf_counter(), line[6:].strip()))
    except aiohttp.ClientError as error:
        exchange.status = repr(error)


def summary(exchanges: list[Exchange], wall_s: float) -> dict[str, Any]:
    """Totals, and per sample: seconds to the first text, seconds between pieces of text."""
    found: dict[str, Any] = {"wall_s": wall_s, "completion_tokens": 0, "prompt_tokens": 0}
    found |= {"first_s": [], "gaps_s": [], "errors": []}
    for exchange in exchanges:
        texts, usage = [], None
        for at_s, data in exchange.pieces:
            piece = {} if data == b"[DONE]" else json.loads(data)
            usage = piece.get("usage") or usage
            if "error" in piece:
                found["errors"].append(str(piece["error"]))
            if any(choice.get("text") for choice in piece.get("choices", ())):
                texts.append(at_s)
        if exchange.status != "200" or usage is None or not texts:
            found["errors"].append(f"status {exchange.status}, {len(texts)} pieces of text")
            continue
        found["completion_tokens"] += usage["completion_tokens"]
        found["prompt_tokens"] += usage["prompt_tokens"]
        found["first_s"].append(texts[0] - exchange.sent_s)
        found["gaps_s"] += [later - sooner for sooner, later in itertools.pairwise(texts)]
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(json.load(sys.stdin)))))
