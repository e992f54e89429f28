"""A scheduler that remembers, a tiny real text model, and the real server around them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edged.core import (
    Delta,
    EngineSpan,
    Finish,
    FinishReason,
    Health,
    Request,
    Timings,
    TokenLogprob,
    Usage,
)
from edged.errors import RequestError
from edged.ingress.http import HttpServer
from edged.ingress.prepare import Catalog
from edged.metrics import Metrics
from edged.settings import Generation, Http
from edged.status import Status
from edged.text.model import TextModel

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MODEL = "tiny"
CONTEXT_TOKENS = 256


def tiny_model(folder: Path, context_tokens: int = CONTEXT_TOKENS) -> TextModel:
    """A real TextModel whose tokens are single bytes, with ChatML as its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*CONTROLS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    card = {
        "name": MODEL,
        "context_tokens": context_tokens,
        "tokenizer_vocab": len(vocabulary),
        "eos_ids": [2],
        "eos_token": "<|im_end|>",
    }
    (folder / "model.json").write_text(json.dumps(card))
    return TextModel.load(folder)


class FakeStream:
    """What the scheduler's submit returns, driven by hand; remembers whether it was closed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.closed = asyncio.Event()
        self.taken = 0  # events the reader has got
        self._events: deque[Delta | Finish] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def say(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """One Delta with one token per character."""
        ids = tuple(range(len(text)))
        self._put(Delta(text, ids, tuple(logprobs)))

    def end(
        self, reason: FinishReason = "stop", code: str | None = None, message: str | None = None
    ) -> None:
        usage = Usage(len(self.request.prompt_ids), 7, 2)
        spans = (EngineSpan("cpu", MODEL, 0, 7),)
        self._put(Finish(reason, usage, spans, Timings(0.001, 0.02, 0.5), code, message))

    def _put(self, event: Delta | Finish) -> None:
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta | Finish:
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self.taken += 1
        self._ended = isinstance(event, Finish)
        return event

    async def aclose(self) -> None:
        self.closed.set()


class FakeScheduler:
    """Admits everything unless `refusal` is set. answer: what every stream says at once;
    None = the test drives the streams, taken from `next`."""

    def __init__(self) -> None:
        self.submitted: list[FakeStream] = []
        self.refusal: Exception | None = None
        self.answer: str | None = "Hello"
        self._news: asyncio.Queue[FakeStream] = asyncio.Queue()

    def submit(self, request: Request) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request)
        self.submitted.append(stream)
        self._news.put_nowait(stream)
        if self.answer is not None:
            stream.say(self.answer)
            stream.end()
        return stream

    async def next(self) -> FakeStream:
        return await asyncio.wait_for(self._news.get(), 10)


class CrashingStream(FakeStream):
    """Has a bug: raises what no stream may raise."""

    async def __anext__(self) -> Delta | Finish:
        if self._events:
            return self._events.popleft()
        raise ZeroDivisionError("a bug")


READY = Status(
    node="node-1",
    version="0",
    mode="normal",
    reason="all engines are ready",
    ready=True,
    engines=(("cpu", Health("ready", slots=8)),),
)


@dataclass
class Site:
    """A running server and its surroundings."""

    server: HttpServer
    scheduler: FakeScheduler
    metrics: Metrics
    text: TextModel
    unix_socket: Path
    status: Status = READY
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def metric(self, line: str) -> float:
        """The value of one exposed series, written as in the exposition; 0 when absent."""
        for shown in self.metrics.exposition(self.status).decode().splitlines():
            name, _, value = shown.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0


@asynccontextmanager
async def serving(folder: Path, **http: Any) -> AsyncIterator[Site]:
    """The real HttpServer on a free port and a Unix socket, over a fake scheduler."""
    text = tiny_model(folder / "model")
    scheduler, metrics = FakeScheduler(), Metrics("node-1", text.name)
    unix_socket = folder / "api.sock"
    config = Http(**({"port": 0, "unix_socket": str(unix_socket)} | http))
    site: Site | None = None

    def status() -> Status:
        assert site is not None
        return site.status

    catalog = Catalog([text], Generation(max_tokens=64))
    server = HttpServer(config, "node-1", scheduler, catalog, metrics, status)  # type: ignore[arg-type]
    site = Site(server, scheduler, metrics, text, unix_socket)
    await server.start()
    try:
        yield site
    finally:
        await server.stop()


class RawClient:
    """Bytes to and from a server, without an HTTP library's good manners."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, head: str, body: bytes = b"") -> None:
        """head: request line and headers, one per line; Host is added."""
        lines = [head.strip().replace("\n", "\r\n"), "Host: 127.0.0.1", "", ""]
        self.writer.write("\r\n".join(lines).encode("latin-1") + body)

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> None:
        head = f"POST {path} HTTP/1.1\nContent-Type: {content_type}\nContent-Length: {len(body)}"
        self.send(head, body)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower-case names) and body of one answer with a length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split(" ")[1]), headers, body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):  # the server was quicker
            await self.writer.wait_closed()

    def reset(self) -> None:
        """Go away without a word of farewell (RST)."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(site: Site, unix: bool = False) -> AsyncIterator[RawClient]:
    """A connection for the length of the block."""
    if unix:
        raw = RawClient(*await asyncio.open_unix_connection(str(site.unix_socket)))
    else:
        raw = RawClient(*await asyncio.open_connection("127.0.0.1", site.server.port))
    try:
        yield raw
    finally:
        await raw.close()


def refusal(code: str, after_s: float | None = None) -> RequestError:
    return RequestError(code, "not now", retry_after_s=after_s)


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
