"""Clients that leave, stall or wait: their slot is freed at once and nothing piles up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from fakes_http import FakeStream, RawClient, Site, chat_body, connected, serving

CHAT = "/v1/chat/completions"
CANCELLED = 'edged_cancelled_total{reason="%s"}'


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path, ping_interval_s=0.05, write_timeout_s=0.3) as site:
        site.scheduler.answer = None
        yield site


def ask(raw: RawClient, stream: bool) -> None:
    raw.post(CHAT, json.dumps(chat_body(stream=stream)).encode())


async def closed(stream: FakeStream) -> None:
    await asyncio.wait_for(stream.closed.wait(), 10)


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("farewell", ["close", "reset"])
@pytest.mark.parametrize("moment", ["queued", "generating"])
async def test_a_client_that_leaves_closes_its_stream(
    site: Site, unix: bool, stream: bool, farewell: str, moment: str
) -> None:
    """In the queue or in decode, streaming or not, by FIN or RST: the stream is closed."""
    async with connected(site, unix) as raw:
        ask(raw, stream)
        fake = await site.scheduler.next()
        if moment == "generating":
            fake.say("some ")
            if stream:
                await raw.reader.readuntil(b"some ")
        if farewell == "close":
            await raw.close()
        else:
            raw.reset()

        await closed(fake)
    while not site.metric(CANCELLED % "disconnect"):
        await asyncio.sleep(0)  # the handler's own ending
    line = f'edged_requests_total{{code="499",ingress="http",route="{CHAT}"}}'
    assert site.metric(line) == 1


async def test_a_client_that_leaves_while_sending_submits_nothing(site: Site) -> None:
    """A body cut off by a disconnect never becomes a request."""
    async with connected(site) as raw:
        raw.send(f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Length: 99", b"{")
        await raw.writer.drain()
    while not site.metric(CANCELLED % "disconnect"):
        await asyncio.sleep(0.01)

    assert site.scheduler.submitted == []


async def test_a_finished_stream_is_closed_too(site: Site) -> None:
    """Every stream is closed on the way out, so nothing depends on its reader's luck."""
    async with connected(site) as raw:
        ask(raw, stream=False)
        fake = await site.scheduler.next()
        fake.say("x")
        fake.end()
        assert (await raw.answer())[0] == 200
    assert fake.closed.is_set()


async def test_pings_come_while_there_is_nothing_to_say(site: Site) -> None:
    """From the queue on, a silent stream shows that it lives, between whole events only."""
    async with connected(site) as raw:
        ask(raw, stream=True)
        fake = await site.scheduler.next()
        for _ in range(3):
            await asyncio.wait_for(raw.reader.readuntil(b": ping\n\n"), 10)
        fake.say("now")
        await raw.reader.readuntil(b"now")
        await asyncio.wait_for(raw.reader.readuntil(b": ping\n\n"), 10)
        fake.end()
        await asyncio.wait_for(raw.reader.readuntil(b"data: [DONE]\n\n"), 10)


@asynccontextmanager
async def not_reading(site: Site) -> AsyncIterator[RawClient]:
    """A client whose kernel takes little, so that not reading is felt soon."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.server.port))
    raw = RawClient(*await asyncio.open_connection(sock=sock, limit=1024))
    try:
        yield raw
    finally:
        raw.reset()


async def test_a_client_that_does_not_read_holds_no_memory_and_loses_its_connection(
    site: Site,
) -> None:
    """Writing stops as soon as the kernel is full; after the limit the connection is cut."""
    async with not_reading(site) as raw:
        ask(raw, stream=True)
        fake = await site.scheduler.next()
        piece = "x" * 20_000
        for _ in range(500):
            fake.say(piece)  # 10 MB wait in the stream, not in the server

        await closed(fake)
        assert fake.taken < 100  # under 2 MB ever left the stream
        while not site.metric(CANCELLED % "slow_reader"):
            await asyncio.sleep(0)


async def test_a_slow_reader_does_not_slow_its_neighbours(site: Site) -> None:
    """While one client does not read, another gets its whole answer."""
    async with not_reading(site) as raw, connected(site) as other:
        ask(raw, stream=True)
        stuck = await site.scheduler.next()
        for _ in range(200):
            stuck.say("x" * 20_000)
        ask(other, stream=True)
        fake = await site.scheduler.next()
        for _ in range(50):
            fake.say("y" * 100)
        fake.end()
        shown = await asyncio.wait_for(other.reader.readuntil(b"data: [DONE]\n\n"), 10)

        assert shown.count(b"y" * 100) == 50
    await closed(stuck)


async def test_a_vanished_client_is_noticed_by_the_kernel(site: Site) -> None:
    """Accepted connections carry the time-outs that end half-open ones, and small buffers."""
    async with connected(site) as raw:
        ask(raw, stream=False)
        fake = await site.scheduler.next()
        server = site.server._runner.server
        assert server is not None
        (connection,) = server.connections
        sock = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 256 * 1024
        fake.end()
        await raw.answer()


async def test_pipelined_requests_of_a_client_that_left_are_not_started(site: Site) -> None:
    """Only the request under way was submitted; those behind it die with the connection."""
    async with connected(site) as raw:
        for _ in range(5):
            ask(raw, stream=False)
        fake = await site.scheduler.next()
        raw.reset()
        await closed(fake)
        await asyncio.sleep(0.05)

    assert len(site.scheduler.submitted) == 1


async def test_stopping_the_server_closes_all_streams(tmp_path: Path) -> None:
    """stop() ends what is left: no stream stays open behind a closed server."""
    async with serving(tmp_path) as site:
        site.scheduler.answer = None
        async with connected(site) as one, connected(site) as two:
            ask(one, stream=False)
            ask(two, stream=True)
            fakes = [await site.scheduler.next(), await site.scheduler.next()]
            await asyncio.wait_for(site.server.stop(), 20)

            assert all(fake.closed.is_set() for fake in fakes)
