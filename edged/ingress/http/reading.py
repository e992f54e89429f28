"""Reading request bodies: bounded in bytes, in time and in how many large ones at once."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edged.config import Http
from edged.errors import RequestError

SMALL_BYTES = 64 * 1024  # up to this a body needs no permit and is decoded on the loop
MAX_LARGE = 16


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
        try:
            return await asyncio.wait_for(self._permitted(request, length), self._timeout_s)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise RequestError("request_timeout", message) from None
        except web.RequestPayloadError:  # broken chunks or compression
            raise RequestError("invalid_request", "the body's encoding is broken") from None

    async def _permitted(self, request: web.Request, length: int | None) -> bytes:
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
