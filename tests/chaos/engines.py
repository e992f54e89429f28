"""Cases of engines: workers that die, hang, run out of memory or write nonsense under load."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable

import psutil

from chaos.checks import expect_whole
from chaos.clients import Ask, Told
from chaos.lab import WAYS, Lab


async def under_load(
    lab: Lab, rng: random.Random, strike: Callable[[], object], latest: int = 120
) -> list[Told]:
    """Eight streams, and something happens at a random step, up to `latest`; all answers."""
    async with lab.crowd() as answers:
        await lab.begun(1)
        await lab.stepped(rng.randint(0, latest))
        strike()
        return await answers


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


async def ordered(lab: Lab, rng: random.Random, *words: str) -> list[Told]:
    """A fault of the board at a random step under load."""
    after = str(rng.randint(1, 60))
    return await under_load(lab, rng, lambda: lab.order(*words, "--after", after), 20)


async def failed(lab: Lab, rng: random.Random, *words: str) -> None:
    """A fault that costs the worker."""
    before = (await lab.engine("npu"))["restarts"]
    tolds = await ordered(lab, rng, *words)
    assert moved(tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds)
    assert (await lab.engine("npu"))["restarts"] > before


async def exception(lab: Lab, rng: random.Random) -> None:
    await failed(lab, rng, "aicore-fault")


async def device_lost(lab: Lab, rng: random.Random) -> None:
    await failed(lab, rng, "lost")


async def hung(lab: Lab, rng: random.Random) -> None:
    """An execute that does not end."""
    await failed(lab, rng, "hang")


async def no_memory_in_steps(lab: Lab, rng: random.Random) -> None:
    """More often than a step is repeated: a rung is left, and climbed again by itself."""
    await failed(lab, rng, "oom", "--at", "step", "--times", "3")


async def no_memory_once(lab: Lab, rng: random.Random) -> None:
    """A step is repeated; nobody notices."""
    tolds = await ordered(lab, rng, "oom", "--at", "step")
    assert not moved(tolds), [told.engines for told in moved(tolds)]
    await expect_whole(lab, tolds)


async def no_memory_at_load(lab: Lab, rng: random.Random) -> None:
    """The worker dies, and the next one finds no memory to load the model."""
    worker = lab.worker("npu")
    lab.order("oom")
    tolds = await under_load(lab, rng, worker.kill)
    assert moved(tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds)


async def no_memory_in_fallback(lab: Lab, rng: random.Random) -> None:
    """The NPU's worker dies, and the CPU's, which is to go on with its streams, gets no memory for
    their caches: what no engine is left for ends with an error and with what was written."""
    lab.worker("cpu").kill()  # one that has no large caches yet
    await lab.gone("cpu")
    await lab.normal()
    npu, cpu = lab.worker("npu"), lab.worker("cpu")
    before = (await lab.engine("cpu"))["restarts"]
    long = [Ask("words without end " * 32, 150, 0.0, i, way) for i, way in enumerate(WAYS[:3])]
    async with lab.crowd(lab.home.crowd()[3:] + long) as answers:
        await lab.begun(8)
        await lab.stepped(rng.randint(0, 60))
        held = cpu.memory_info().vms - (1 << 20)
        cpu.rlimit(psutil.RLIMIT_AS, (held, held))
        npu.kill()
        tolds = await answers
    assert any(told.code for told in tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds, may_fail={"engine_fault"})
    assert (await lab.engine("cpu"))["restarts"] > before


async def row_not_finite(lab: Lab, rng: random.Random) -> None:
    """NaN in one row: one request moves, its neighbours' answers are those of an undisturbed run
    (which expect_whole checks of every answer)."""
    before = (await lab.engine("npu"))["restarts"]
    row = str(rng.randrange(8))
    async with lab.crowd() as answers:
        await lab.begun(8)
        lab.order("nan", "--row", row, "--after", "40")  # when all eight are in one batch
        tolds = await answers
    reasons = [span["reason"] for told in tolds for span in told.engines[1:]]
    if (await lab.engine("npu"))["restarts"] == before:  # else there were too many in a minute
        assert reasons == ["row_fault"], [told.engines for told in tolds]
    await expect_whole(lab, tolds)


async def nothing_finite(lab: Lab, rng: random.Random) -> None:
    """NaN in all rows of a step."""
    tolds = await ordered(lab, rng, "nan")
    assert moved(tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds)


async def both_dead_at_once(lab: Lab, rng: random.Random) -> None:
    """The streams wait for the engine that has not failed them, and it goes on with them; where
    it was seen alive for a moment and has taken them, both have failed them, and they end so."""
    workers = [lab.worker("npu"), lab.worker("cpu")]

    def strike() -> None:
        for worker in workers:
            worker.kill()

    tolds = await under_load(lab, rng, strike)
    assert moved(tolds) or any(told.code for told in tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds, may_fail={"engine_fault"})


async def both_dead_in_turn(lab: Lab, rng: random.Random) -> None:
    """The second engine dies with the streams of the first: they end with an error and with what
    was written, exactly once."""
    npu, cpu = lab.worker("npu"), lab.worker("cpu")
    async with lab.crowd() as answers:
        await lab.begun(8)
        npu.kill()
        while not (await lab.engine("cpu"))["running"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0, 0.3))
        cpu.kill()
        tolds = await answers
    assert any(told.code for told in tolds), [told.engines for told in tolds]
    await expect_whole(lab, tolds, may_fail={"engine_fault"})
