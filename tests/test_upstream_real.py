"""The upstream engine against real servers: llama.cpp's own and a second edged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon import Daemon, daemon
from reference import demo_gguf, exported

from edged.core import Chat, ChatMessage, Prompt, Request, Sampling
from edged.engine.upstream import UpstreamEngine
from edged.engine.upstream.dial import dial_of
from edged.errors import EngineFault, RowFault
from edged.settings import Upstream
from edged.text.model import TextModel

pytestmark = pytest.mark.model

TOOL = Path(__file__).parent.parent / "tools" / "llama_server.py"
GRASS = [{"role": "user", "content": "Explain in two sentences why grass is green."}]
GRASS_CHAT = Chat((ChatMessage("user", "Explain in two sentences why grass is green."),))
EXACT = "cpu.dtype=fp32"  # greedy answers do not depend on how the tokens were batched
GREEDY = Sampling(temperature=0.0)


@contextmanager
def llama_server(slots: int = 2, context_tokens: int = 512) -> Iterator[tuple[str, int]]:
    """(URL, process id) of llama.cpp's own server on the demo model."""
    command = [sys.executable, str(TOOL), "--model", str(demo_gguf()), "--threads", "2"]
    command += ["--slots", str(slots), "--context-tokens", str(context_tokens)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    with llama_server() as (url, _):
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@asynccontextmanager
async def started(url: str) -> AsyncIterator[UpstreamEngine]:
    upstream = Upstream(url=url)
    engine = UpstreamEngine(upstream, dial_of(upstream, {}))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def asked(source: Chat | Prompt, max_tokens: int = 40, sampling: Sampling = GREEDY) -> Request:
    return Request("r", "demo", (1,), max_tokens, sampling, source=source)


async def written(engine: UpstreamEngine, request: Request, begun: str = "") -> tuple[str, int]:
    text, tokens = "", 0
    async for step in engine.run_text(request, begun):
        text += step.text or ""
        tokens = step.tokens or tokens
    return text, tokens


async def test_llama_cpp_gives_through_us_what_it_gives_itself(llama: str) -> None:
    """Greedy chat and raw prompt: the same words, its own count of tokens, its own name."""
    plain = {"temperature": 0, "max_tokens": 40}
    async with started(llama) as engine:
        for source, path, body in (
            (GRASS_CHAT, "/v1/chat/completions", {"messages": GRASS}),
            (Prompt("The sky is"), "/v1/completions", {"prompt": "The sky is"}),
        ):
            own = await asyncio.to_thread(post, llama, path, body | plain)
            choice = own["choices"][0]
            text, tokens = await written(engine, asked(source))  # type: ignore[arg-type]
            assert text == (choice["message"]["content"] if "message" in choice else choice["text"])
            assert tokens == own["usage"]["completion_tokens"]
        assert engine.model.endswith(".gguf") and "llama.cpp" in engine.health().detail


@pytest.mark.parametrize("source", [GRASS_CHAT, Prompt("The sky is")], ids=["chat", "prompt"])
async def test_llama_cpp_goes_on_where_a_text_was_cut(llama: str, source: Chat | Prompt) -> None:
    """Before and after the blank between two words: the rest is the rest, nothing twice."""
    async with started(llama) as engine:
        whole, _ = await written(engine, asked(source))
        blanks = [at for at, char in enumerate(whole) if char == " " and at > 8][:4:3]
        for at in (cut for blank in blanks for cut in (blank, blank + 1)):
            rest, _ = await written(engine, asked(source, 8), whole[:at])
            assert rest and whole.startswith(whole[:at] + rest), (whole, at, rest)


@pytest.mark.parametrize("source", [GRASS_CHAT, Prompt("The sky is")], ids=["chat", "prompt"])
@pytest.mark.parametrize("rivals", [0, 3])
async def test_llama_cpp_tells_log_probabilities(
    llama: str, source: Chat | Prompt, rivals: int
) -> None:
    """One per token, by its bytes; greedy draws the likeliest."""
    async with started(llama) as engine:
        wish = Sampling(temperature=0.0, logprobs=rivals)
        steps = [s async for s in engine.run_text(asked(source, 8, wish), "")]
    found = [one for step in steps for one in step.logprobs]
    text = "".join(step.text or "" for step in steps)
    assert len(found) == 8
    assert b"".join(one.token_id for one in found).decode() == text  # type: ignore[misc]
    for one in found:
        assert -20 < one.logprob <= 0
        assert [token for token, _ in one.top][:1] == [one.token_id][:rivals]
        assert len(one.top) == rivals


async def test_a_seed_gives_the_same_words_again(llama: str) -> None:
    """Sampling parameters reach the server."""
    async with started(llama) as engine:
        warm = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=7)
        first, again, other = [
            (await written(engine, asked(GRASS_CHAT, 20, s)))[0]
            for s in (warm, warm, Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=8))
        ]
        assert first == again != other


async def test_leaving_llama_cpp_frees_its_slot(llama: str) -> None:
    """Its two slots serve others as soon as we close the connection."""
    async with started(llama) as engine:
        for _ in range(6):
            run = engine.run_text(asked(GRASS_CHAT, 400, Sampling(ignore_eos=True)), "")
            await run.__anext__()
            run.close()
        text, _ = await asyncio.wait_for(written(engine, asked(GRASS_CHAT, 5)), 20)
        assert text


async def test_a_prompt_too_long_for_llama_cpp_is_a_row_fault(llama: str) -> None:
    """It refuses; the engine stays."""
    async with started(llama) as engine:
        with pytest.raises(RowFault, match="400"):
            await written(engine, asked(Prompt("word " * 2000)))
        assert engine.health().state == "ready"


async def test_a_llama_cpp_that_dies_is_a_named_fault() -> None:
    """Its streams fail in words and the engine is not ready any more."""
    with llama_server(slots=1) as (url, pid):
        async with started(url) as engine:
            run = engine.run_text(asked(GRASS_CHAT, 400, Sampling(ignore_eos=True)), "")
            await run.__anext__()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineFault, match="cut the answer"):
                async for _ in run:
                    pass
            assert engine.capacity() == 0
            assert engine.health().state == "failed"


def test_a_dead_llama_cpp_leaves_its_stream_to_the_cpu() -> None:
    """Real daemon, upstream first: what it wrote is tokenised and the CPU engine goes on."""
    with (
        llama_server() as (url, pid),
        daemon("engines.chain=['openai','cpu']", f"upstream.url={url}") as node,
        openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0) as api,
    ):
        wait_for(node, "cpu")
        text, last = "", None
        stream = api.chat.completions.create(
            model="",
            messages=GRASS,  # type: ignore[arg-type]
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                last = (chunk.model_extra or {}).get("edged") or last
            if len(text) > 60 and pid:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        assert last is not None
        first, second = last["engines"]
        assert (first["name"], second["name"]) == ("openai", "cpu")
        assert first["model"].endswith(".gguf") and not first["approximate"]
        assert second["approximate"] and second["reason"] == "engine_fault"
        assert second["to_token"] == 60
        assert first["to_token"] == second["from_token"] > 10
        model = TextModel.load(exported("auto"))
        assert 40 < len(model.text_ids(text)) <= 60  # control tokens have no text
        assert GRASS[0]["content"] not in node.log


def test_a_second_edged_goes_on_when_ours_loses_its_engine() -> None:
    """Two real daemons: the worker of the first is killed, the second one ends the answer."""
    with (
        daemon(EXACT) as second,
        daemon(EXACT, "engines.chain=['cpu','openai']", f"upstream.url={second.url}") as node,
        openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0) as api,
    ):
        wait_for(node, "cpu", "openai")
        body: dict[str, Any] = {"model": "", "messages": GRASS, "max_tokens": 60, "temperature": 0}
        whole = api.chat.completions.create(**body).choices[0].message.content
        text, last = "", None
        for chunk in api.chat.completions.create(**body, stream=True):
            if not text and chunk.choices and chunk.choices[0].delta.content:
                (worker,) = node.workers()
                worker.kill()
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                last = (chunk.model_extra or {}).get("edged") or last
        assert last is not None
        assert [s["name"] for s in last["engines"]] == ["cpu", "openai"]
        assert last["engines"][1]["approximate"]
        assert text == whole  # the same weights, greedy
        for log in (node.log, second.log):
            assert "grass is green" not in log


def wait_for(node: Daemon, *names: str) -> None:
    """Until these engines are ready."""
    import time

    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        states = {e["name"]: e["state"] for e in node.get("/edged/v1/status")["engines"]}
        if all(states[name] == "ready" for name in names):
            return
        time.sleep(0.1)
    raise AssertionError(node.log)
