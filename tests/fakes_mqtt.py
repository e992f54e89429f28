"""Hand-written fakes for the MQTT tests: a scheduler under the test's control, a text model of
bytes, and a requester that remembers what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiomqtt
import msgspec

from edged.core import Delta, EngineSpan, Finish, FinishReason, Request, Timings, Usage
from edged.errors import RequestError
from edged.ingress.mqtt import MqttIngress
from edged.ingress.prepare import Catalog
from edged.metrics import Metrics
from edged.settings import Mqtt
from edged.status import Status

NODE = "n1"
ROOT = f"edged/v1/{NODE}"
WAIT_S = 10.0


class BytesText:
    """Token ids are the bytes of the text; a chat is its contents joined by newlines."""

    name = "fake"
    context_tokens = 4096

    async def prompt_ids(self, text: str) -> tuple[int, ...]:
        if not text:
            raise RequestError("invalid_request", "prompt gives no token", "prompt")
        return tuple(text.encode())

    async def chat_ids(self, messages: Sequence[Any], **more: Any) -> tuple[int, ...]:
        return tuple("\n".join(_content(message) for message in messages).encode())


def _content(message: Any) -> str:
    return str(message["content"] if isinstance(message, dict) else message.content)


class FakeStream:
    """Deltas and the Finish come when the test says so."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.closed = False
        self._tokens = 0
        self._events: asyncio.Queue[Delta | Finish] = asyncio.Queue()
        self._over = False

    @property
    def prompt(self) -> str:
        return bytes(self.request.prompt_ids).decode()

    def say(self, *texts: str) -> None:
        for text in texts:
            self._tokens += 1
            self._events.put_nowait(Delta(text, (self._tokens,)))

    def end(
        self, reason: FinishReason = "stop", code: str | None = None, message: str | None = None
    ) -> None:
        if self.finish is not None:
            return
        usage = Usage(len(self.request.prompt_ids), self._tokens)
        engines = (EngineSpan("cpu", "fake", 0, self._tokens),)
        self.finish = Finish(reason, usage, engines, Timings(0.001, 0.002, 0.003), code, message)
        self._events.put_nowait(self.finish)

    def crash(self) -> None:
        """As a bug of ours would: the stream ends without a Finish."""
        self._over = True
        self._events.put_nowait(Delta(""))

    def cancel(self) -> None:
        self.end("cancelled", "cancelled", "the request was cancelled")

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta | Finish:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        self._over = self._over or isinstance(event, Finish)
        return event

    async def aclose(self) -> None:
        self.closed = True
        self.cancel()


class FakeScheduler:
    """answer: text every request gets at once; None = the test answers. refusal: raised."""

    def __init__(self, answer: str | None = None) -> None:
        self.answer = answer
        self.refusal: RequestError | None = None
        self.streams: list[FakeStream] = []
        self._news = asyncio.Event()

    def submit(self, request: Request) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request)
        self.streams.append(stream)
        self._news.set()
        if self.answer is not None:
            stream.say(self.answer)
            stream.end()
        return stream

    async def stream(self, index: int = 0) -> FakeStream:
        """The stream of the index-th request, as soon as it is submitted."""
        while len(self.streams) <= index:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), WAIT_S)
        return self.streams[index]


def idle_status() -> Status:
    return Status(NODE, "0", "normal", "all engines are ready", True)


def ingress(
    url: str, scheduler: FakeScheduler, metrics: Metrics | None = None, **keys: Any
) -> MqttIngress:
    """An ingress of node n1, as the app builds it; keys: of Mqtt."""
    keys = {"reconnect_max_s": 0.2, "chunk_interval_s": 0.02, **keys}
    return MqttIngress(
        Mqtt(url=url, **keys),
        NODE,
        scheduler,  # type: ignore[arg-type]
        Catalog([BytesText()]),  # type: ignore[list-item]
        metrics or Metrics(NODE, "fake"),
        idle_status,
    )


async def until(true: Any, within_s: float = WAIT_S) -> None:
    """Wait for a condition that some other process brings about."""
    end_s = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < end_s, "the condition did not come true"
        await asyncio.sleep(0.01)


async def up(made: MqttIngress) -> None:
    """Connected, and all it had to say has been taken by the broker."""
    await until(lambda: made.connected and not len(made._outbox))


@contextlib.asynccontextmanager
async def serving(
    url: str, scheduler: FakeScheduler, metrics: Metrics | None = None, **keys: Any
) -> AsyncIterator[MqttIngress]:
    """A started and connected ingress; stopped afterwards."""
    made = ingress(url, scheduler, metrics, **keys)
    await made.start()
    try:
        await up(made)
        yield made
    finally:
        await made.stop()


@dataclass
class Got:
    """One message a requester was sent. body: its JSON, or the text where it is none."""

    topic: str
    body: Any
    retain: bool
    qos: int
    correlation: bytes | None
    user: dict[str, str]


class Requester:
    """A client of the broker that subscribes, publishes and remembers."""

    def __init__(self, client: aiomqtt.Client) -> None:
        self.client = client
        self.got: deque[Got] = deque()
        self._news = asyncio.Event()

    async def ask(self, verb: str, body: Any, **more: Any) -> None:
        payload = body if isinstance(body, str | bytes) else msgspec.json.encode(body)
        await self.client.publish(f"{ROOT}/req/{verb}", payload, qos=1, **more)

    async def next(self, within_s: float = WAIT_S) -> Got:
        while not self.got:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), within_s)
        return self.got.popleft()

    async def last(self) -> list[Got]:
        """All messages up to the first final, error or status."""
        found = [await self.next()]
        while found[-1].body["type"] in ("accepted", "chunk"):
            found.append(await self.next())
        return found

    async def nothing(self) -> None:
        """Nothing is under way to us: a marker sent now arrives first."""
        await self.client.publish("marker", b'"marker"', qos=1)
        got = await self.next()
        assert got.topic == "marker", got

    async def collect(self) -> None:
        async for message in self.client.messages:
            found = message.properties
            try:
                body = msgspec.json.decode(message.payload)
            except msgspec.DecodeError:
                body = bytes(message.payload).decode()
            self.got.append(
                Got(
                    str(message.topic),
                    body,
                    message.retain,
                    message.qos,
                    getattr(found, "CorrelationData", None),
                    dict(getattr(found, "UserProperty", [])),
                )
            )
            self._news.set()


@contextlib.asynccontextmanager
async def requester(
    port: int, *filters: str, version: aiomqtt.ProtocolVersion = aiomqtt.ProtocolVersion.V311
) -> AsyncIterator[Requester]:
    """Subscribed to `filters`, by default to all answers of the node and to all reply topics."""
    wanted = filters or (f"{ROOT}/res/#", "edged/v1/reply/#")
    no_delay = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)
    client = aiomqtt.Client("127.0.0.1", port, protocol=version, socket_options=no_delay)
    async with client:
        made = Requester(client)
        await client.subscribe([(name, 1) for name in (*wanted, "marker")])
        task = asyncio.ensure_future(made.collect())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Proxy:
    """Stands between a client and the broker: cuts connections, or acts as an older broker.

    open: whether connections are let through. against_v5: "" or how MQTT 5 is refused:
    "connack" (as a 3.1.1 broker should) or "hangup" (as some do). versions: protocol levels of
    the CONNECTs seen.
    """

    def __init__(self, target: int, open: bool = True, against_v5: str = "") -> None:
        self.target = target
        self.open = open
        self.against_v5 = against_v5
        self.versions: list[int] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every connection without a word."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self.open:
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side may break at any time
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connect = await reader.read(4096)
        if not connect:
            return
        self.versions.append(connect[connect.index(b"MQTT") + 4])
        if self.versions[-1] == 5 and self.against_v5:
            if self.against_v5 == "connack":
                writer.write(b"\x20\x02\x00\x01")
                await writer.drain()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers.add(back)
        back.write(connect)
        ways = {
            asyncio.ensure_future(_copy(reader, back)),
            asyncio.ensure_future(_copy(there, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            back.transport.abort()
            self._writers.discard(back)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
