"""Connection: aiohttp's protocol with our words for broken HTTP and a cap on how many there are.

What fails before a request exists (a bad request line, headers too large) never reaches the
middleware; it is answered here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import structlog
from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from edged.errors import RequestError
from edged.ingress.http.errors import error_response

log = structlog.get_logger("edged.http")

MAX_CONNECTIONS = 1024
KEEPALIVE_S = 75.0  # also how long a client may take to send its headers
LINGER_S = 3.0  # reading what is left of a refused body, so that the refusal arrives
_BUSY_BODY = (
    b'{"error":{"message":"too many connections; ask again","type":"rate_limit_error",'
    b'"param":null,"code":"rate_limit_exceeded"}}'
)
BUSY = (
    b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
) % (len(_BUSY_BODY), _BUSY_BODY)

Answered = Callable[[str, str, int], None]


class Connection(RequestHandler):
    """One per client connection. answered: (ingress, route, status), for the metrics."""

    __slots__ = ("_answered", "_node", "_server")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, node: str, answered: Answered
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]
        )
        self._server = server
        self._node = node
        self._answered = answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) > MAX_CONNECTIONS and self.transport is not None:
            self.transport.write(BUSY)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that could not be read; the connection ends with it."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has already begun")
        error, number = _read_error(status, exc), secrets.token_hex(12)
        if error.code == "internal_error":
            log.error("connection_crashed", request_id=number, exc_info=exc)
        else:
            log.info(
                "unreadable_request", request_id=number, client=request.remote, code=error.code
            )
        self._answered("http", "other", error.spec.status)
        response = error_response(error)
        response.headers.update(
            {"x-request-id": number, "edged-node": self._node, "Server": "edged"}
        )
        response.force_close()
        return response


def _read_error(status: int, error: BaseException | None) -> RequestError:
    if isinstance(error, http_exceptions.LineTooLong) or "Too many" in str(error):
        return RequestError("headers_too_large", "the request line or the headers are too large")
    if status < 500:
        return RequestError("invalid_request", "the request is not valid HTTP/1.1")
    return RequestError("internal_error", "internal error; see the node's log")
