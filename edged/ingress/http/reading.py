"""Reading request bodies: bounded in bytes, in time and in how many large ones at once."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edged.errors import RequestError
from edged.settings import Http

SMALL_BYTES = 64 * 1024  # up to this a body needs no permit and is decoded on the loop
MAX_LARGE = 16


async def expect_later(request: web.Request) -> None:
    """For routes whose body BodyReader reads: "100 Continue" waits until it is wanted, so a
    refused upload never starts."""


class BodyReader:
    """One per server."""

    def __init__(self, config: Http) -> None:
        self._max_bytes = config.max_body_bytes
        self._timeout_s = config.body_timeout_s
        self._large = asyncio.Semaphore(MAX_LARGE)

    async def read(self, request: web.Request) -> bytes:
        """Raises RequestError: payload_too_large, request_timeout, invalid_request."""
        length = request.content_length
        if length is not None and length > self._max_bytes:
            raise self._too_large()
        # Not wait_for: before Python 3.12 it can swallow the cancellation by a disconnect.
        reading = asyncio.ensure_future(self._permitted(request, length))
        try:
            await asyncio.wait({reading}, timeout=self._timeout_s)
            if not reading.done():
                message = f"the body did not arrive within {self._timeout_s:g} s"
                raise RequestError("request_timeout", message)
            return reading.result()
        except web.RequestPayloadError:  # broken chunks or compression
            raise RequestError("invalid_request", "the body's encoding is broken") from None
        finally:
            reading.cancel()

    async def _permitted(self, request: web.Request, length: int | None) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        if length is not None and length <= SMALL_BYTES:
            return await self._all(request)
        async with self._large:
            return await self._all(request)

    async def _all(self, request: web.Request) -> bytes:
        body = bytearray()
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > self._max_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> RequestError:
        return RequestError("payload_too_large", f"the body is larger than {self._max_bytes} bytes")
