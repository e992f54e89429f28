"""Sse: one server-sent event stream to one client. Pings while there is nothing to say.

Keeps nothing: a client that does not read makes `send` wait, and after write_timeout_s loses
its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from types import TracebackType

import msgspec
from aiohttp import web

from edged.settings import Http

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Sse:
    """Use as `async with`: entering sends the headers."""

    def __init__(self, request: web.Request, config: Http) -> None:
        self._request = request
        self._config = config
        self._response = web.StreamResponse(headers=HEADERS)
        self._loop = asyncio.get_running_loop()
        self._last_s = 0.0
        self._pinger: asyncio.Task[None] | None = None
        self.stalled = False  # the connection was cut because the client did not read

    async def __aenter__(self) -> Sse:
        await self._response.prepare(self._request)
        self._last_s = self._loop.time()
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_pinging()

    async def send(self, event: object) -> None:
        """One event with a JSON object as its data."""
        await self._limited(self._response.write(_event(event)))

    async def close(self) -> web.StreamResponse:
        """Say that the answer is complete."""
        return await self._end(DONE)

    async def give_up(self, error: object) -> web.StreamResponse:
        """End the stream with an error event."""
        return await self._end(_event(error))

    async def _end(self, last: bytes) -> web.StreamResponse:
        self._stop_pinging()  # nothing may follow the end
        await self._limited(self._response.write(last))
        await self._limited(self._response.write_eof())
        return self._response

    async def _limited(self, write: Awaitable[None]) -> None:
        self._last_s = self._loop.time()
        limit = self._loop.call_later(self._config.write_timeout_s, self._cut)
        try:
            await write
        finally:
            limit.cancel()

    def _stop_pinging(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    def _cut(self) -> None:
        self.stalled = True
        if self._request.transport is not None:
            self._request.transport.abort()  # cancels the handler

    async def _ping(self) -> None:
        interval_s = self._config.ping_interval_s
        with contextlib.suppress(ConnectionError):  # the handler learns of it by itself
            while True:
                idle_s = self._loop.time() - self._last_s
                if idle_s < interval_s:
                    await asyncio.sleep(interval_s - idle_s)
                    continue
                self._last_s = self._loop.time()
                # Only into an empty buffer: such a write never waits, so there is never a second
                # task in the connection's drain (they would share one future and cancel it).
                transport = self._request.transport
                if transport is not None and transport.get_write_buffer_size() == 0:
                    await self._response.write(PING)


def _event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
