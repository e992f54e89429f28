"""Cases of the world around the node: clients, the broker, the operating system."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time

import aiohttp
import psutil

from chaos.checks import expect_whole
from chaos.clients import ANSWER_S, Ask
from chaos.engines import under_load
from chaos.lab import Lab, heard_out
from chaos.mqtt import ROOT

HEALTH_S = 3.0  # here the machine is busy with the clients, too; tools/bench_carryover.py measures
MAY_HEAR = {"queue_full"}  # where hundreds are at it


async def broker_killed(lab: Lab, rng: random.Random) -> None:
    """HTTP does not notice; every MQTT answer comes when the broker is back."""
    async with lab.crowd() as answers:
        await lab.begun(2)
        await asyncio.sleep(rng.uniform(0.2, 1.2))
        await asyncio.to_thread(lab.broker.kill)
        await asyncio.sleep(rng.uniform(0.1, 2.0))
        await asyncio.to_thread(lab.broker.start)
        tolds = await answers
    await expect_whole(lab, tolds, repeats=True)


async def paused(lab: Lab, rng: random.Random) -> None:
    """The daemon does not run for longer than any step may take, as on a machine that was
    suspended: when time goes on nobody is blamed for it."""
    before = [engine["restarts"] for engine in (await lab.status())["engines"]]
    async with lab.crowd() as answers:
        await lab.begun(2)
        await lab.stepped(rng.randint(0, 60))
        lab.process.suspend()
        try:
            await asyncio.sleep(rng.choice((3.0, 25.0, 25.0)))
        finally:
            lab.process.resume()
        tolds = await answers
    await expect_whole(lab, tolds)
    after = [engine["restarts"] for engine in (await lab.status())["engines"]]
    assert after == before, (after, [told.engines for told in tolds])


async def no_files_left(lab: Lab, rng: random.Random) -> None:
    """The daemon may open no more files, connections come all the same, and the NPU's worker
    dies: streams go on with the CPU, and once files are there again all is as before."""
    npu = lab.worker("npu")
    old = lab.process.rlimit(psutil.RLIMIT_NOFILE)
    async with lab.crowd() as answers:
        await lab.begun(8)
        limit = lab.process.num_fds() + 2
        lab.process.rlimit(psutil.RLIMIT_NOFILE, (limit, old[1]))
        callers = [asyncio.create_task(called(lab)) for _ in range(20)]
        try:
            npu.kill()
            await asyncio.sleep(2.0)
        finally:
            lab.process.rlimit(psutil.RLIMIT_NOFILE, old)
        tolds = await answers
        await asyncio.gather(*callers)
    await expect_whole(lab, tolds)


async def called(lab: Lab) -> bool:
    """A health check; whether it was answered."""
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        await lab.get("/healthz", timeout_s=20.0)
        return True
    return False


async def left(lab: Lab, rng: random.Random, count: int = 300) -> None:
    """So many clients leave, queued, in prefill and in decode, streaming and not; MQTT requests
    are cancelled, hundreds over one connection. Those who stay do not notice."""
    left_to_do = iter(range(count))

    async def leavers(own: random.Random) -> None:
        for index in left_to_do:
            await (cancels(lab, index) if index % 5 == 0 else leaves(lab, own))

    async with lab.crowd() as answers:
        await asyncio.gather(*(leavers(random.Random(rng.random())) for _ in range(16)))
        tolds = await answers
    await expect_whole(lab, tolds, may_fail=MAY_HEAR)


async def leaves(lab: Lab, rng: random.Random) -> None:
    """Sends a request and closes, or resets, the connection a little later."""
    ask = Ask("word " * rng.choice((1, 20, 60)), 200)
    body = json.dumps(ask.body | {"model": "", "stream": rng.random() < 0.5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{lab.daemon.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", lab.daemon.port)
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.05))
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def cancels(lab: Lab, index: int) -> None:
    """An MQTT request and its cancellation, over the one connection of the requester; it has
    ended, exactly once, before the next."""
    name = f"c{next(lab.ids)}"
    told = await lab.mqtt.ask(name, Ask("Cancel me", 200), stream=False)
    await asyncio.sleep(0.01 * (index % 4))
    await lab.mqtt.publish(f"{ROOT}/req/cancel", {"id": name})
    await heard_out(told)
    assert told.ends == 1, (name, told, lab.tail())
    assert told.finish in ("cancelled", "length") or told.code in MAY_HEAR, (name, told)
    del lab.mqtt.told[name], lab.mqtt.chunks[name]


async def burst(lab: Lab, rng: random.Random, count: int = 400) -> None:
    """400 requests at once: those admitted are whole, the others hear 429 and when to ask again,
    and health is told all the while."""
    del rng
    health = asyncio.create_task(watched(lab))
    answers = await asyncio.gather(*(asked(lab, 8) for _ in range(count)))
    refused = [after for status, after in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}, answers
    assert all(1 <= after <= 60 for after in refused), refused
    assert sum(status == 200 for status, _ in answers) >= 64
    assert await health < HEALTH_S
    await expect_whole(lab, [])


async def asked(lab: Lab, tokens: int) -> tuple[int, int]:
    """(status, Retry-After)."""
    body = Ask("Hello", tokens).body | {"model": ""}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with (
        aiohttp.ClientSession(lab.daemon.url, timeout=timeout) as session,
        session.post("/v1/completions", json=body) as reply,
    ):
        found = await reply.json()
        if reply.status == 200:
            assert found["usage"]["completion_tokens"] == tokens
        return reply.status, int(reply.headers.get("Retry-After", "0"))


async def watched(lab: Lab) -> float:
    """The longest wait for an answer of the health route while the burst lasts; seconds."""
    longest_s = 0.0
    for _ in range(10):
        began_s = time.monotonic()
        await lab.get("/healthz", timeout_s=10.0)
        longest_s = max(longest_s, time.monotonic() - began_s)
        await asyncio.sleep(0.05)
    return longest_s


async def slow_readers(lab: Lab, rng: random.Random) -> None:
    """Four clients ask for long answers and read nothing: they lose their connection (by us, or by
    the kernel where it has room for the whole answer), and nobody else notices."""
    cut = "edged_cancelled_total"
    before = await lab.metric(cut)
    sockets = [sleeper(lab) for _ in range(4)]
    try:
        tolds = await under_load(lab, rng, lambda: None)
        end_s = time.monotonic() + 60
        while await lab.metric(cut) < before + 4:
            assert time.monotonic() < end_s, lab.tail()
            await asyncio.sleep(0.2)
    finally:
        for one in sockets:
            one.close()
    await expect_whole(lab, tolds)


def sleeper(lab: Lab) -> socket.socket:
    """A connection with a long streamed answer that nobody reads."""
    body = Ask("Never read", 900).body | {"model": "", "stream": True, "logprobs": 5}
    data = json.dumps(body).encode()
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect(("127.0.0.1", lab.daemon.port))
    made.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{lab.daemon.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return made
