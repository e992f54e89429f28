"""What every request passes through: identity, checks, one shape of errors, one log line."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from edged.errors import RequestError
from edged.ingress.http.call import CALL, Call, new_call
from edged.ingress.http.errors import error_response, routing_error
from edged.ingress.http.guard import Guard, check_media_type, is_local, request_id
from edged.ingress.http.keys import ApiKeys
from edged.metrics import Metrics

log = structlog.get_logger("edged.http")

OPEN_ROUTES = frozenset({"/", "/livez", "/readyz", "/healthz", "/health"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gate:
    """The middleware of one server and what it needs to decide."""

    def __init__(self, node: str, guard: Guard, keys: ApiKeys | None, metrics: Metrics) -> None:
        self._node = node
        self._guard = guard
        self._keys = keys
        self._metrics = metrics

    async def on_prepare(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Headers of every answer, streams included."""
        call = request.get(CALL)
        response.headers["edged-node"] = self._node
        response.headers["Server"] = "edged"  # nobody needs to know our versions
        if call is not None:
            response.headers["x-request-id"] = call.request_id
            response.headers.update(call.cors)

    @web.middleware
    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        given = request.headers.get("x-request-id")
        call = new_call(request, request_id(given, secrets.token_hex(12)), loop.time())
        request[CALL] = call
        try:
            response = await self._answer(request, handler, call)
            call.status = call.status or response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            # The client has gone (or the server is being stopped): nobody hears an answer.
            call.status = 499
            call.cancelled = call.cancelled or "disconnect"
            self._metrics.cancelled.add(call.cancelled)
            raise
        finally:
            self._metrics.answered("http", call.route, call.status)
            call.write_log(loop.time())

    async def _answer(
        self, request: web.Request, handler: Handler, call: Call
    ) -> web.StreamResponse:
        try:
            preflight = self._check(request, call)
            if preflight is not None:
                return web.Response(status=204, headers=preflight)
            return await handler(request)
        except RequestError as error:
            call.error = error.code
            return error_response(error)
        except web.HTTPException as exception:
            refusal = routing_error(exception, f"{request.method} {request.path[:128]}")
            call.error = refusal.code
            response = error_response(refusal)
            if "Allow" in exception.headers:
                response.headers["Allow"] = exception.headers["Allow"]
            return response
        except ConnectionError:
            raise
        except Exception:
            # A bug of ours: this request fails, the node goes on, the log tells.
            call.error = "internal_error"
            log.exception("request_crashed", request_id=call.request_id)
            message = f"internal error; see the node's log for request {call.request_id}"
            return error_response(RequestError("internal_error", message))

    def _check(self, request: web.Request, call: Call) -> dict[str, str] | None:
        """The order is part of the promise: who asks from where, then what, then whether they
        may. Returns the headers of a CORS preflight's answer, None for any other request."""
        if not call.unix_socket:
            self._guard.check_host(request.headers.getall("Host", []), _own_address(request))
        self._guard.check_origin(request.headers, request.method)
        call.cors = self._guard.cors_headers(request.headers.get("Origin"))
        if request.method == "OPTIONS":
            preflight = self._guard.preflight_headers(request.headers)
            if preflight is not None:
                return preflight
        if request.match_info.http_exception is not None:
            raise request.match_info.http_exception
        self._authenticate(request, call)
        if request.method == "POST":
            check_media_type(request.headers.get("Content-Type", ""))
        return None

    def _authenticate(self, request: web.Request, call: Call) -> None:
        """The Unix socket's permissions are its keys; without a key file any key will do."""
        if self._keys is None or call.unix_socket or call.route in OPEN_ROUTES:
            return
        if call.route == "/metrics" and is_local(call.address):
            return
        call.client = self._keys.check(request.headers.get("Authorization"))


def _own_address(request: web.Request) -> str:
    """The address the client has connected to."""
    name = request.transport.get_extra_info("sockname") if request.transport else None
    return str(name[0]) if isinstance(name, tuple) else ""
