"""The error table: every refusal and every fault has a code, a status and an owner.

First half: what a caller must handle (`RequestError`). Second half: our own faults
(`RowFault`, `EngineFault`) and start-up errors (`ConfigError`, `EngineUnavailable`).
HTTP and MQTT render `RequestError` from this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edged.core import EngineSpan


class ErrorSpec(NamedTuple):
    """status: HTTP status; type: OpenAI's error type; retryable: worth the same request again."""

    status: int
    type: str
    retryable: bool


# Statuses and types as the OpenAI API has them; codes are shared with MQTT.
TABLE: dict[str, ErrorSpec] = {
    "invalid_request": ErrorSpec(400, "invalid_request_error", False),
    "invalid_json": ErrorSpec(400, "invalid_request_error", False),
    "unsupported_parameter": ErrorSpec(400, "invalid_request_error", False),
    "unsupported_content": ErrorSpec(400, "invalid_request_error", False),
    "context_length_exceeded": ErrorSpec(400, "invalid_request_error", False),
    "template_error": ErrorSpec(400, "invalid_request_error", False),
    "unauthorized": ErrorSpec(401, "authentication_error", False),
    "forbidden": ErrorSpec(403, "permission_error", False),
    "not_found": ErrorSpec(404, "not_found_error", False),
    "model_not_found": ErrorSpec(404, "not_found_error", False),
    "method_not_allowed": ErrorSpec(405, "invalid_request_error", False),
    "request_timeout": ErrorSpec(408, "invalid_request_error", True),
    "id_conflict": ErrorSpec(409, "invalid_request_error", False),
    "payload_too_large": ErrorSpec(413, "invalid_request_error", False),
    "unsupported_media_type": ErrorSpec(415, "invalid_request_error", False),
    "headers_too_large": ErrorSpec(431, "invalid_request_error", False),
    "rate_limit_exceeded": ErrorSpec(429, "rate_limit_error", True),
    "queue_full": ErrorSpec(429, "rate_limit_error", True),
    "deadline_unmeetable": ErrorSpec(429, "rate_limit_error", False),
    "deadline_exceeded": ErrorSpec(504, "server_error", False),
    "cancelled": ErrorSpec(499, "invalid_request_error", False),
    "internal_error": ErrorSpec(500, "server_error", False),
    "row_fault": ErrorSpec(500, "server_error", True),
    "engine_fault": ErrorSpec(503, "server_error", True),
    "model_loading": ErrorSpec(503, "server_error", True),
    "engine_unavailable": ErrorSpec(503, "server_error", True),
    "npu_unavailable": ErrorSpec(503, "server_error", True),
    "thermal_shutdown": ErrorSpec(503, "server_error", True),
    "shutting_down": ErrorSpec(503, "server_error", True),
}


@dataclass
class RequestError(Exception):
    """Something the caller is told: a refusal before the first byte or the error of a Finish.

    param: the field at fault ("messages[0].content"); retry_after_s: 1..60 where known.
    engines: who wrote what before it failed.
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    engines: tuple[EngineSpan, ...] = ()

    def __post_init__(self) -> None:
        super().__init__(self.message)
        if self.code not in TABLE:
            raise ValueError(f"error code {self.code!r} is not in the table")

    @property
    def spec(self) -> ErrorSpec:
        return TABLE[self.code]


class EdgedError(Exception):
    """Base of our own faults; callers above the engine see them as `failed` streams."""

    code = "internal_error"


class RowFault(EdgedError):
    """One sequence's trouble (NaN row, constraint dead end); its neighbours are untouched."""

    code = "row_fault"


class EngineFault(EdgedError):
    """The engine's trouble: death, hang, fatal code, failed self test, broken wire."""

    code = "engine_fault"


class EngineBusy(EngineFault):
    """The engine cannot take this stream now, and has written nothing of it: it may come again."""


class Overheated(EngineFault):
    """Above the critical temperature nothing may run on this board."""

    code = "thermal_shutdown"


class EngineMoved(EngineFault):
    """The engine restarts on purpose: the stream goes on elsewhere, or there again."""

    code = "engine_moved"


class WireError(EngineFault):
    """A frame that cannot be sent or understood; the peer is treated as lost."""


class ConfigError(EdgedError):
    """The configuration cannot be used; the message names the key (exit 78)."""


class EngineUnavailable(EdgedError):
    """No engine of the chain can start (exit 75)."""

    code = "engine_unavailable"
