"""What an error looks like over HTTP: OpenAI's error object, the status, the retry headers.

Pure. Every refusal and every failure leaves through here, whatever raised it.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from edged.core import Finish
from edged.errors import TABLE, RequestError

# When the raiser knows no better: seconds after which asking again makes sense.
RETRY_AFTER_S = {
    "queue_full": 1.0,
    "rate_limit_exceeded": 1.0,
    "engine_fault": 2.0,
    "row_fault": 1.0,
    "model_loading": 5.0,
    "shutting_down": 5.0,
    "engine_unavailable": 10.0,
    "npu_unavailable": 10.0,
    "thermal_shutdown": 30.0,
}
# Statuses that OpenAI's clients retry on their own unless told otherwise.
_RETRIED = (408, 409, 429)
# After these the rest of the request's body, or the node itself, is not worth the connection.
_CLOSING = ("request_timeout", "payload_too_large", "headers_too_large", "shutting_down")


def error_json(error: RequestError) -> dict[str, Any]:
    body: dict[str, Any] = {
        "error": {
            # What a client sent may be quoted in it, half characters included.
            "message": error.message.encode("utf-8", "replace").decode(),
            "type": error.spec.type,
            "param": error.param,
            "code": error.code,
        }
    }
    if error.engines:
        body["edged"] = {"engines": [asdict(span) for span in error.engines]}
    return body


def error_response(error: RequestError) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode(error_json(error)),
        status=error.spec.status,
        reason="Client Closed Request" if error.spec.status == 499 else None,
        content_type="application/json",
        headers=retry_headers(error),
    )
    if error.code in _CLOSING:
        response.force_close()
    return response


def retry_headers(error: RequestError) -> dict[str, str]:
    """Retry-After is whole seconds, 1 to 60: beyond that clients fall back to a quick retry."""
    status, _, retryable = error.spec
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if not retryable:
        if status in _RETRIED or status >= 500:
            headers["x-should-retry"] = "false"
        return headers
    after_s = error.retry_after_s or RETRY_AFTER_S.get(error.code)
    if after_s is not None:
        after_s = min(60.0, max(0.001, after_s))
        headers["Retry-After"] = str(math.ceil(after_s))
        headers["retry-after-ms"] = str(math.ceil(after_s * 1000))
    return headers


def finish_error(finish: Finish) -> RequestError | None:
    """None for an answer (stop, length); else what the caller is told instead."""
    if finish.reason in ("stop", "length"):
        return None
    code = "cancelled" if finish.reason == "cancelled" else finish.error_code
    if code is None or code not in TABLE:
        code = "internal_error"
    message = finish.error_message or f"the request was {finish.reason}"
    return RequestError(code, message, engines=finish.engines)


def routing_error(error: web.HTTPException, path_and_method: str) -> RequestError:
    """aiohttp's own refusals, in our words."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return RequestError("method_not_allowed", f"{path_and_method}: use {allowed}")
    if isinstance(error, web.HTTPNotFound):
        return RequestError("not_found", f"{path_and_method}: no such route; see GET /")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return RequestError("payload_too_large", "the body is too large")
    if error.status < 500:
        return RequestError("invalid_request", error.reason)
    return RequestError("internal_error", "internal error; see the node's log")
