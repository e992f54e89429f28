"""Cases that a daemon lives through. Each breaks something under eight mixed streams, and then
asks checks.expect_whole. `CASES` is what the soak draws from."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

from chaos.checks import expect_whole
from chaos.clients import Told
from chaos.lab import Lab

Case = Callable[[Lab, random.Random], Awaitable[None]]


async def under_load(
    lab: Lab, rng: random.Random, strike: Callable[[], object], latest_s: float = 1.5
) -> list[Told]:
    """Eight streams, and something happens at a random moment; all answers."""
    tasks = lab.crowd(lab.home.crowd())
    try:
        await lab.begun(1)
        await asyncio.sleep(rng.uniform(0, latest_s))
        strike()
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def moved(tolds: list[Told]) -> list[Told]:
    return [told for told in tolds if len(told.wrote) > 1]


async def signalled(lab: Lab, rng: random.Random, signum: signal.Signals) -> None:
    worker = lab.worker("npu")
    tolds = await under_load(lab, rng, lambda: worker.send_signal(signum))
    assert moved(tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds)


async def killed(lab: Lab, rng: random.Random) -> None:
    await signalled(lab, rng, signal.SIGKILL)


async def crashed(lab: Lab, rng: random.Random) -> None:
    await signalled(lab, rng, signal.SIGSEGV)


async def stopped(lab: Lab, rng: random.Random) -> None:
    """SIGSTOP: to the daemon that is a worker that hangs."""
    await signalled(lab, rng, signal.SIGSTOP)


CASES: dict[str, Case] = {
    "worker killed": killed,
    "worker crashed": crashed,
    "worker stopped": stopped,
}
SMOKE = ("worker killed",)
