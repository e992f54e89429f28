"""The two generation routes: read, prepare, submit, answer whole or as a stream.

The scheduler's Stream is closed on every way out, so a client that leaves frees its slot at
once: aiohttp cancels the handler when the connection goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from edged.core import Delta, Finish, Request, TokenLogprob
from edged.errors import RequestError
from edged.ingress.http.bodies import Body, ChatBody, CompletionBody, decode
from edged.ingress.http.call import CALL, Call
from edged.ingress.http.errors import error_json, finish_error
from edged.ingress.http.reading import SMALL_BYTES, BodyReader
from edged.ingress.http.replies import ChatReply, Head, Reply, TextReply, fingerprint
from edged.ingress.http.sse import Sse
from edged.ingress.messages import invalid
from edged.ingress.prepare import Catalog, prepare
from edged.metrics import Metrics
from edged.scheduler import Scheduler, Stream
from edged.settings import Http

log = structlog.get_logger("edged.http")

# Headers of a stream wait this long for its first event: a failure until then has a status
# that clients know how to retry.
EARLY_S = 1.0
MAX_DEADLINE_MS = 3_600_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Generation:
    """Handlers of POST /v1/chat/completions and /v1/completions."""

    def __init__(
        self, config: Http, scheduler: Scheduler, catalog: Catalog, metrics: Metrics
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._catalog = catalog
        self._metrics = metrics
        self._bodies = BodyReader(config)
        self.draining = False

    def routes(self) -> dict[str, Handler]:
        return {"/v1/chat/completions": self.chat, "/v1/completions": self.completion}

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, ChatBody, ChatReply, "chatcmpl-")

    async def completion(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, CompletionBody, TextReply, "cmpl-")

    async def _generate(
        self,
        http: web.Request,
        kind: type[Body],
        dialect: Callable[[Head], Reply],
        prefix: str,
    ) -> web.StreamResponse:
        if self.draining:
            raise RequestError("shutting_down", "the node is shutting down; ask another one")
        body, ignored = await self._body(http, kind)
        call = http[CALL]
        call.stream = bool(body.stream)
        call.request = request = await self._prepared(http, body, call)
        options = body.stream_options
        text = self._catalog.find(request.model).text
        head = Head(
            id=prefix + request.id,
            created_s=int(time.time()),
            text=text,
            with_usage=bool(body.stream and options and options.include_usage),
            with_logprobs=request.sampling.logprobs is not None,
            fingerprint=fingerprint(text),
            ignored=ignored,
        )
        if http.transport is None:
            raise ConnectionResetError("the client left while its request was prepared")
        stream = self._scheduler.submit(request)
        async with contextlib.aclosing(stream):
            if body.stream:
                return await self._stream(http, stream, dialect(head), call)
            return await self._whole(stream, dialect(head), call)

    async def _body(self, http: web.Request, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        data = await self._bodies.read(http)
        if len(data) <= SMALL_BYTES:
            return decode(data, kind)
        return await asyncio.to_thread(decode, data, kind)

    async def _prepared(self, http: web.Request, body: Body, call: Call) -> Request:
        now_s = asyncio.get_running_loop().time()
        deadline_ms = _header_int(http, "X-Edged-Deadline-Ms", 1, MAX_DEADLINE_MS)
        priority = _header_int(http, "X-Edged-Priority", 0, 9)
        return await prepare(
            body.draft(),
            self._catalog,
            # Not the client's own id: two clients may choose the same one.
            request_id=secrets.token_hex(12),
            client=call.client,
            ingress="http",
            now_s=now_s,
            deadline_s=None if deadline_ms is None else now_s + deadline_ms / 1000,
            priority=5 if priority is None else priority,
            forwarded="X-Edged-Forwarded" in http.headers,
        )

    async def _whole(self, stream: Stream, reply: Reply, call: Call) -> web.Response:
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        pace = self._metrics.pace()
        loop = asyncio.get_running_loop()
        async for event in stream:
            if isinstance(event, Finish):
                call.finish = event
                if (error := finish_error(event)) is not None:
                    raise error
                body = reply.whole("".join(texts), logprobs, event)
                return _json(body)
            pace.tick(loop.time(), event.tokens)
            texts.append(event.text)
            logprobs += event.logprobs
        raise RuntimeError("a stream ended without its Finish")

    async def _stream(
        self, http: web.Request, stream: Stream, reply: Reply, call: Call
    ) -> web.StreamResponse:
        first = asyncio.ensure_future(stream.__anext__())
        try:
            await asyncio.wait({first}, timeout=min(EARLY_S, self._config.ping_interval_s))
            if first.done() and isinstance(early := first.result(), Finish):
                call.finish = early
                if (error := finish_error(early)) is not None:
                    raise error
            async with Sse(http, self._config) as sse:
                try:
                    return await self._events(sse, first, stream, reply, call)
                except (ConnectionError, asyncio.CancelledError):
                    if sse.stalled:
                        call.cancelled = "slow_reader"
                    raise
                except Exception:
                    # A bug of ours after the headers: all that is left is to say so.
                    call.status, call.error = 500, "internal_error"
                    log.exception("request_crashed", request_id=call.request_id)
                    message = "internal error; see the node's log"
                    return await sse.give_up(error_json(RequestError("internal_error", message)))
        finally:
            first.cancel()

    async def _events(
        self,
        sse: Sse,
        first: asyncio.Future[Delta | Finish],
        stream: Stream,
        reply: Reply,
        call: Call,
    ) -> web.StreamResponse:
        pace = self._metrics.pace()
        loop = asyncio.get_running_loop()
        for opening in reply.opening():
            await sse.send(opening)
        event = await first
        while not isinstance(event, Finish):
            pace.tick(loop.time(), event.tokens)
            if (chunk := reply.delta(event)) is not None:
                await sse.send(chunk)
            event = await stream.__anext__()
        call.finish = event
        if (error := finish_error(event)) is not None:
            call.error = error.code
            return await sse.give_up(error_json(error))
        for closing in reply.closing(event):
            await sse.send(closing)
        return await sse.close()


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _header_int(http: web.Request, name: str, least: int, greatest: int) -> int | None:
    given = http.headers.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise invalid(name, f"must be a whole number from {least} to {greatest}")
    if not least <= int(given) <= greatest:
        raise invalid(name, f"must be from {least} to {greatest}")
    return int(given)
