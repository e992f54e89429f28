"""Break one daemon again and again, at random, and tell what it holds after every round.

    .venv/bin/python tools/soak.py --rounds 20 [--seed S]

A round is a case of tests/chaos: something dies under eight mixed streams, then everything is
checked. Ends with one line `RESULT ` and a JSON object; exit code 1 for a broken promise or for
memory, files or threads that grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from chaos.cases import CASES
from chaos.lab import Home, Lab, home, lab
from chaos.trend import trend

CASE_S = 200.0
# Growth per round that counts, where it is not chance.
RSS_MIB, FDS, THREADS = 0.25, 0.05, 0.05


@dataclass
class Held:
    """What the idle daemon held, round by round."""

    rss_mib: list[float] = field(default_factory=list)
    fds: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def look(self, made: Lab) -> None:
        process = made.process
        with process.oneshot():
            self.rss_mib.append(process.memory_info().rss / 2**20)
            self.threads.append(process.num_threads())
        self.fds.append(process.num_fds())

    def trends(self) -> dict[str, float]:
        """What grows, and how fast per round."""
        found = {
            "rss_mib": trend(self.rss_mib, RSS_MIB),
            "fds": trend(self.fds, FDS),
            "threads": trend(self.threads, THREADS),
        }
        return {name: round(slope, 3) for name, slope in found.items() if slope is not None}


@dataclass
class Soak:
    rounds: int = 0
    violations: list[str] = field(default_factory=list)
    trends: list[dict[str, float]] = field(default_factory=list)
    held: Held = field(default_factory=Held)  # of the daemon that lived longest

    def settle(self, held: Held) -> None:
        """A daemon has lived its life."""
        if found := held.trends():
            self.trends.append(found)
        if len(held.fds) > len(self.held.fds):
            self.held = held

    def result(self, wall_s: float) -> dict[str, Any]:
        made: dict[str, Any] = {"rounds": self.rounds, "violations": self.violations}
        made |= {"trends": self.trends, "wall_s": round(wall_s, 1)}
        held = self.held
        for name, values in (("rss_mib", held.rss_mib), ("fds", held.fds)):
            if values:
                made |= {f"{name}_first": round(values[0], 1), f"{name}_last": round(values[-1], 1)}
        return made


def bag(rng: random.Random, only: str) -> Iterator[str]:
    """Every case once in random order, again and again."""
    names = [name for name in CASES if only in name]
    while names:
        yield from rng.sample(names, len(names))


async def live(made_home: Home, rounds: Iterator[str], rng: random.Random, soak: Soak) -> None:
    """One daemon, until the rounds are over or a promise is broken."""
    held = Held()
    async with lab(made_home) as made:
        await asyncio.wait_for(CASES["burst"](made, rng), CASE_S)  # the heap's high-water mark
        for name in rounds:
            began_s = time.monotonic()
            soak.rounds += 1
            try:
                await asyncio.wait_for(CASES[name](made, rng), CASE_S)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
                soak.violations.append(f"{soak.rounds} {name}: {str(error)[:500]}")
                traceback.print_exc()
                break
            held.look(made)
            print(
                f"{soak.rounds:4} {name:27} {time.monotonic() - began_s:6.1f} s  "
                f"rss {held.rss_mib[-1]:6.1f} MiB  fds {held.fds[-1]:3.0f}  "
                f"threads {held.threads[-1]:2.0f}",
                flush=True,
            )
    soak.settle(held)


def run(rounds: int, seed: int, only: str) -> Soak:
    soak, rng = Soak(), random.Random(seed)
    names = [name for name, _ in zip(bag(rng, only), range(rounds), strict=False)]
    left = iter(names)
    with home() as made_home:
        while soak.rounds < len(names):
            asyncio.run(live(made_home, left, rng, soak))
    return soak


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--only", default="", help="cases whose name contains it")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no process is left behind
    print(f"{args.rounds} rounds, seed {args.seed}", flush=True)
    began_s = time.monotonic()
    soak = Soak()
    with contextlib.suppress(KeyboardInterrupt):
        soak = run(args.rounds, args.seed, args.only)
    result = soak.result(time.monotonic() - began_s)
    print("RESULT " + json.dumps(result))
    return 0 if soak.rounds and not (soak.violations or soak.trends) else 1


if __name__ == "__main__":
    sys.exit(main())
