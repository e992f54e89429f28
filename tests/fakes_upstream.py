"""A hand-written OpenAI-compatible server on a real socket, that fails as real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Answer = Callable[["FakeUpstream", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]
REFERENCE = "The sky is blue because it is 🙂 full of ünïcode, they say. And so it goes on."


class FakeUpstream:
    """Continues REFERENCE after the assistant's last message (or after the prompt "P:") unless
    `script` holds other answers, one per POST. left: answers whose reader went away early."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "ref-1", "owned_by": "vllm"}]
        self.models_body = b""  # in place of the list
        self.models_status = 200
        self.health_status = 200
        self.reference = REFERENCE
        self.script: deque[Answer] = deque()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.left = asyncio.Event()
        self.port = 0
        self.scheme = "http"
        self.busy = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {
                    n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                verb, path, _ = first.split(" ")
                self.headers.append(headers)
                self.paths.append(path)
                if verb == "POST":
                    await self._post(reader, writer, json.loads(body))
                    break
                self._get(writer, path)
        writer.close()

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/v1/models":
            raw = {"object": "list", "data": self.models}
            plain(writer, self.models_status, self.models_body or raw)
        elif path == "/health":
            plain(writer, self.health_status, {})
        else:
            plain(writer, 404, {"error": {"message": "no such route"}})

    async def _post(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> None:
        self.asked.append(body)
        answer = self.script.popleft() if self.script else say()
        self.busy += 1
        work = asyncio.ensure_future(answer(self, writer, body))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, gone}, return_when="FIRST_COMPLETED")
            if not work.done():
                self.left.set()
        finally:
            self.busy -= 1
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def continuation(self, body: dict[str, Any]) -> str:
        """What this server writes next; a prefix that is not the reference's own is a bug."""
        if "prompt" in body:
            written = body["prompt"].removeprefix("P:")
        else:
            last = body["messages"][-1]
            written = last["content"] if last["role"] == "assistant" else ""
            assert bool(written) == bool(body.get("continue_final_message"))
        assert self.reference.startswith(written), written
        return self.reference[len(written) :]


def plain(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    """body: JSON, or the bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + data)


def begin(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")


def event(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(fields).encode() + b"\n\n")


def chunk(body: dict[str, Any], text: str, finish: str | None = None) -> dict[str, Any]:
    said = {"text": text} if "prompt" in body else {"delta": {"content": text} if text else {}}
    return {"choices": [{"index": 0, "finish_reason": finish, **said}]}


def say(
    most: int | None = None,
    size: int = 3,
    pause_s: float = 0.0,
    usage: bool = True,
    finish: str | None = "stop",
    then: Answer | None = None,
) -> Answer:
    """The continuation in pieces of `size` characters. most: cut off after that many."""

    async def answer(fake: FakeUpstream, writer: asyncio.StreamWriter, body: Any) -> None:
        begin(writer)
        if "messages" in body:
            event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        text = fake.continuation(body)[:most]
        for at in range(0, len(text), size):
            event(writer, chunk(body, text[at : at + size]))
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        if then is not None:
            await then(fake, writer, body)
            return
        if most is not None:
            return
        event(writer, chunk(body, "", finish))
        if usage:
            event(writer, {"choices": [], "usage": {"completion_tokens": 17}})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    return answer


def refuse(status: int, error: Any = None, **headers: str) -> Answer:
    async def answer(fake: FakeUpstream, writer: asyncio.StreamWriter, body: Any) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        plain(writer, status, {"error": error or {"message": "no"}}, named)
        await writer.drain()

    return answer


def send(data: bytes, hang: bool = False) -> Answer:
    """These bytes in the middle of a stream, then the end or silence."""

    async def answer(fake: FakeUpstream, writer: asyncio.StreamWriter, body: Any) -> None:
        writer.write(data)
        await writer.drain()
        if hang:
            await asyncio.sleep(3600)

    return answer


def hang() -> Answer:
    """Takes the request and never answers."""
    return send(b"", hang=True)


def pings() -> Answer:
    """Alive, but without a word."""

    async def answer(fake: FakeUpstream, writer: asyncio.StreamWriter, body: Any) -> None:
        while True:
            writer.write(b": ping\n\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    return answer


@asynccontextmanager
async def fake_upstream(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeUpstream]:
    fake = FakeUpstream()
    fake.scheme = "https" if tls else "http"
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=tls)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        await asyncio.sleep(0)
