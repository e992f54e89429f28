"""Live, ready, status, metrics: told at once, whatever the load; draining is seen first here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes_http import READY, Site, chat_body, connected, serving

from edged.core import Health

CHAT = "/v1/chat/completions"
ENGINE_LOST = dataclasses.replace(
    READY,
    mode="fault",
    reason="cpu is failed (it died)",
    ready=False,
    engines=(("cpu", Health("failed", "it died")),),
)
SUMS_WRONG = dataclasses.replace(
    READY, mode="degraded", reason="1 audit", ready=False, audit=("1 waits, 2 are queued",)
)
TOO_HOT = dataclasses.replace(READY, mode="throttled", reason="the chip is hot", ready=False)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


async def get(site: Site, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(site.url + path, headers=headers)
        return answer.status, await answer.text(), dict(answer.headers)


async def test_a_healthy_node_is_live_and_ready(site: Site) -> None:
    """All probes are 200 while an engine is ready."""
    for path in ("/livez", "/healthz", "/readyz", "/health"):
        assert (await get(site, path))[0] == 200
    assert json.loads((await get(site, "/health"))[1])["status"] == "ok"


async def test_every_probe_tells_the_oldest_wait_and_the_last_progress(site: Site) -> None:
    """A probe's answer says how long the first in the queue has waited and when a step ended."""
    site.status = dataclasses.replace(READY, waiting=3, oldest_wait_s=1.26, last_progress_s=0.512)
    for path in ("/livez", "/readyz"):
        assert (await get(site, path))[1] == "ok; oldest wait 1.3 s, last progress 0.5 s ago\n"
    assert "oldest wait 1.3 s, last" in (await get(site, "/readyz?verbose"))[1]
    told = json.loads((await get(site, "/health"))[1])
    assert (told["oldest_wait_s"], told["last_progress_s"]) == (1.26, 0.512)


@pytest.mark.parametrize(
    ("status", "failed"),
    [
        (ENGINE_LOST, "[-]engine: cpu is failed"),
        (TOO_HOT, "[-]admission: throttled"),
        (SUMS_WRONG, "[-]audit: 1 waits, 2 are queued"),
    ],
)
async def test_live_is_not_ready(site: Site, status: Any, failed: str) -> None:
    """Without an engine, or while none is admitted, the node is live and not ready."""
    site.status = status

    assert (await get(site, "/livez"))[0] == 200
    for path in ("/readyz", "/health"):
        assert (await get(site, path))[0] == 503
    code, text, _ = await get(site, "/readyz?verbose")
    assert code == 503 and failed in text and text.endswith("not ready\n")


async def test_a_stuck_node_is_not_live(site: Site) -> None:
    """What withholds the watchdog of systemd fails the liveness probe, too, and says why."""
    site.status = dataclasses.replace(READY, stuck="npu: step: nobody is to act on it")
    for path in ("/livez", "/healthz"):
        code, text, _ = await get(site, path)
        assert code == 503 and text.startswith("not live: npu: step: nobody")


async def test_verbose_lists_every_check(site: Site) -> None:
    """The list says which checks passed, in words."""
    code, text, _ = await get(site, "/readyz?verbose")

    assert code == 200
    assert text == (
        "[+]engine: cpu is ready\n[+]admission: open\n[+]audit: all adds up\n"
        "nobody waits, no progress yet\nready\n"
    )


async def test_draining_refuses_new_work_and_finishes_the_old(site: Site) -> None:
    """From drain() on: 503 shutting_down and not ready; a stream under way goes on."""
    site.scheduler.answer = None
    async with connected(site) as old, connected(site) as new:
        old.post(CHAT, json.dumps(chat_body(stream=True)).encode())
        fake = await site.scheduler.next()
        site.server.drain()

        new.post(CHAT, json.dumps(chat_body()).encode())
        status, headers, body = await new.answer()
        assert status == 503 and json.loads(body)["error"]["code"] == "shutting_down"
        assert headers["connection"] == "close" and headers["retry-after"] == "5"
        assert (await get(site, "/readyz"))[0] == 503
        assert "shutting down" in (await get(site, "/readyz?verbose"))[1]
        assert (await get(site, "/livez"))[0] == 200
        fake.say("still here")
        fake.end()
        assert b"still here" in await old.reader.readuntil(b"data: [DONE]\n\n")


async def test_status_is_told_in_json(site: Site) -> None:
    """Mode, reason, engines and queue, as MQTT tells them."""
    site.status = dataclasses.replace(
        READY, waiting=3, running=2, oldest_wait_s=1.23456, last_progress_s=0.5
    )
    code, text, _ = await get(site, "/edged/v1/status")

    told = json.loads(text)
    assert code == 200 and told["mode"] == "normal" and told["node"] == "node-1"
    assert told["queue"] == {"waiting": 3, "oldest_wait_s": 1.235} and told["running"] == 2
    assert told["engines"][0]["state"] == "ready" and told["engines"][0]["slots"] == 8


async def test_the_banner_tells_where_to_go(site: Site) -> None:
    """GET / and HEAD / answer; the text names the routes."""
    code, text, _ = await get(site, "/")
    assert code == 200 and "node-1" in text and CHAT in text
    async with aiohttp.ClientSession() as session:
        assert (await session.head(site.url + "/")).status == 200


async def test_metrics_are_prometheus_text(site: Site) -> None:
    """A scrape has the counts of what was served, with the text format's media type."""
    async with aiohttp.ClientSession() as session:
        await session.post(site.url + CHAT, json=chat_body())
        await session.post(site.url + CHAT, data=b"{")
        await session.get(site.url + "/nowhere/at/all")
    code, text, headers = await get(site, "/metrics")

    assert code == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert f'edged_requests_total{{code="200",ingress="http",route="{CHAT}"}} 1.0' in text
    assert f'edged_requests_total{{code="415",ingress="http",route="{CHAT}"}} 1.0' in text
    assert 'edged_requests_total{code="404",ingress="http",route="other"} 1.0' in text
    assert 'edged_mode{mode="normal"} 1.0' in text
    assert "process_resident_memory_bytes" in text


async def test_health_answers_with_400_requests_in_flight(site: Site) -> None:
    """Neither 400 open streams nor 400 waiting bodies keep a probe from its answer."""
    site.scheduler.answer = None
    loop = asyncio.get_running_loop()
    body = json.dumps(chat_body(stream=True)).encode()
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(connected(site)) for _ in range(400)]
        for raw in raws:
            raw.post(CHAT, body)
        fakes = [await site.scheduler.next() for _ in range(400)]
        worst_s = 0.0
        for path in ("/livez", "/readyz?verbose", "/health", "/metrics") * 5:
            for fake in fakes:
                fake.say("word ")
            start_s = loop.time()
            assert (await get(site, path))[0] == 200
            worst_s = max(worst_s, loop.time() - start_s)
        for fake in fakes:
            fake.end()
        for raw in raws:
            shown = await asyncio.wait_for(raw.reader.readuntil(b"[DONE]"), 30)
            assert shown.count(b"word ") == 20
    assert worst_s < 2.0


async def test_too_many_connections_are_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap on connections answers with 429 instead of running out of descriptors."""
    monkeypatch.setattr("edged.ingress.http.connection.MAX_CONNECTIONS", 2)
    async with connected(site), connected(site):
        await get_twice_refused(site)
    await asyncio.sleep(0.05)
    assert (await get(site, "/livez"))[0] == 200


async def get_twice_refused(site: Site) -> None:
    for _ in range(2):
        async with connected(site) as extra:
            status, headers, body = await extra.answer()
            assert status == 429 and headers["retry-after"] == "1"
            assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
            assert await extra.rest() == b""
