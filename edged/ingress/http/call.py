"""Call: what is known of one HTTP request while it is served, and the one line it leaves in
the log. Never holds a prompt, an answer or a key."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from edged.core import Finish, Request

log = structlog.get_logger("edged.http")

QUIET_ROUTES = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics"})


@dataclass
class Call:
    """request_id: what the client sees. address: the peer's IP, "" on the Unix socket.
    client: key of fair share: the API key's name, "unix:UID" or the address."""

    request_id: str
    method: str
    route: str
    address: str
    client: str
    unix_socket: bool
    started_s: float
    status: int = 0
    error: str | None = None
    cancelled: str | None = None  # how the client gave up
    request: Request | None = None
    finish: Finish | None = None
    stream: bool | None = None
    cors: dict[str, str] = field(default_factory=dict)

    def write_log(self, now_s: float) -> None:
        """One line per request, at its end; health probes leave none."""
        if self.route in QUIET_ROUTES:
            return
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "client": self.client,
            "duration_s": round(now_s - self.started_s, 4),
        }
        if self.request is not None:
            fields |= _generation(self.request, self.finish, self.stream)
        if self.error is not None:
            fields["error"] = self.error
        if self.cancelled is not None:
            fields["cancelled"] = self.cancelled
        write = log.warning if self.status >= 500 else log.info
        write("request", **fields)


CALL = web.RequestKey("call", Call)


def _generation(request: Request, finish: Finish | None, stream: bool | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": request.id,
        "model": request.model,
        "stream": stream,
        "prompt_tokens": len(request.prompt_ids),
    }
    if finish is None:
        return fields
    fields |= {
        "finish": finish.reason,
        "completion_tokens": finish.usage.completion_tokens,
        "cached_tokens": finish.usage.cached_tokens,
        "engines": [span.name for span in finish.engines],
    }
    times = {"queue_s": finish.timings.queue_s, "first_token_s": finish.timings.first_token_s}
    return fields | {name: round(t, 4) for name, t in times.items() if t is not None}


def new_call(request: web.Request, request_id: str, now_s: float) -> Call:
    """Before any check; route is the pattern, so that logs and metrics stay few-valued."""
    sock: socket.socket | None = (
        request.transport.get_extra_info("socket") if request.transport else None
    )
    unix = sock if sock is not None and sock.family == socket.AF_UNIX else None
    address = "" if unix else (request.remote or "unknown")
    resource = request.match_info.route.resource
    return Call(
        request_id=request_id,
        method=request.method if request.method in ("GET", "HEAD", "POST", "OPTIONS") else "other",
        route=resource.canonical if resource is not None else "other",
        address=address,
        client=_unix_client(unix) if unix else address,
        unix_socket=unix is not None,
        started_s=now_s,
    )


def _unix_client(sock: socket.socket) -> str:
    """The user at the other end, as the kernel knows it."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return f"unix:{uid}"
