"""Clients of the chaos suite: each asks once, and records every event of its answer.

They never retry and never judge; `Told` is what checks.py reads.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai

from chaos.truth import TOP_K

ANSWER_S = 100.0  # longer than any hand-over; what is not answered by then is silence


@dataclass(frozen=True)
class Ask:
    """One request. way: "sse", "json" (both plain HTTP), "openai", "openai-sse" or "mqtt"."""

    prompt: str
    tokens: int = 120
    temperature: float = 0.0
    seed: int = 0
    way: str = "sse"

    @property
    def body(self) -> dict[str, Any]:
        made: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.tokens}
        return made | {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": True,
        }

    @property
    def top_k(self) -> int:
        return TOP_K if self.temperature else 0


@dataclass
class Told:
    """What a client heard. ends: how often its answer was ended, by a finish or an error; late:
    events after an end; code: of the error, empty for an answer. Times are of the event loop."""

    ask: Ask
    text: str = ""
    ends: int = 0
    late: int = 0
    finish: str = ""
    code: str = ""
    status: int = 0
    engines: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    pieces_s: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def wrote(self) -> list[str]:
        return [span["name"] for span in self.engines]

    def piece(self, text: str) -> None:
        self.late += self.ends
        if text:
            self.text += text
            self.pieces_s.append(asyncio.get_running_loop().time())
            self.begun.set()

    def end(self, finish: str, code: str = "") -> None:
        self.ends += 1
        self.finish, self.code = finish, code
        self.begun.set()

    def facts(self, body: dict[str, Any]) -> None:
        self.engines = (body.get("edged") or {}).get("engines") or self.engines
        self.usage = body.get("usage") or self.usage


async def ask_http(base: str, told: Told) -> None:
    """Over plain HTTP. A connection that breaks ends nothing: that is silence."""
    stream = told.ask.way == "sse"
    body = told.ask.body | {"model": "", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(base, timeout=timeout) as session:
        try:
            async with session.post("/v1/completions", json=body) as reply:
                told.status = reply.status
                if stream and reply.status == 200:
                    await _listen(reply, told)
                else:
                    _whole(await reply.json(), told)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            told.code = told.code or f"connection: {type(error).__name__}"


async def _listen(reply: aiohttp.ClientResponse, told: Told) -> None:
    finish = ""
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            told.end(finish)
            continue
        event = json.loads(line[6:])
        if "error" in event:
            told.end("failed", event["error"]["code"])
            continue
        told.facts(event)
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            told.piece(choice["text"])


def _whole(body: dict[str, Any], told: Told) -> None:
    if "error" in body:
        told.end("failed", body["error"]["code"])
        return
    told.facts(body)
    told.piece(body["choices"][0]["text"])
    told.end(body["choices"][0]["finish_reason"])


async def ask_openai(base: str, told: Told) -> None:
    """With OpenAI's own client, its retries off."""
    ask = told.ask
    common: dict[str, Any] = {"model": "", "prompt": ask.prompt, "max_tokens": ask.tokens}
    common |= {"temperature": ask.temperature, "seed": ask.seed}
    common["extra_body"] = {"ignore_eos": True, "top_k": ask.top_k}
    api = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=ANSWER_S)
    async with api:
        try:
            if ask.way == "openai":
                answer = await api.completions.create(**common)
                _whole(answer.model_dump(), told)
                return
            options = {"include_usage": True}
            finish = ""
            create: Any = api.completions.create
            async for chunk in await create(**common, stream=True, stream_options=options):
                told.facts(chunk.model_dump())
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    told.piece(choice.text)
            if finish:
                told.end(finish)
        except openai.APIConnectionError as error:
            told.code = told.code or f"connection: {type(error).__name__}"
        except openai.APIStatusError as error:
            told.status = error.status_code
            told.end("failed", str(error.code))
        except openai.APIError as error:  # an error event in mid-stream
            told.end("failed", str(error.code))
