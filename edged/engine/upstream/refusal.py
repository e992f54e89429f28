"""Refusals: what an HTTP answer that is no stream of tokens means for us. Pure.

The server's own words are not repeated (they may quote the prompt): only its status and code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from edged.engine.upstream.events import named
from edged.errors import EngineBusy, EngineFault, RowFault

MAX_ERROR_BYTES = 4096
LONGEST_PAUSE_S = 300.0


class Busy(EngineBusy):
    """after_s: when it may be asked again, if it told."""

    def __init__(self, message: str, after_s: float | None) -> None:
        super().__init__(message)
        self.after_s = after_s


def fault_of(
    status: int, headers: Mapping[str, str], body: bytes, now: datetime | None = None
) -> RowFault | EngineFault:
    """now: wall clock, for a Retry-After that is a date."""
    code = _code(body)
    if status in (429, 503):
        after_s = retry_after_s(headers, now or datetime.now(timezone.utc))
        return Busy(f"it is busy: {status}{code}", after_s)
    if status in (401, 403):
        return EngineFault(f"it refuses the API key: {status}{code}; see upstream.api_key_file")
    if status == 404:
        return EngineFault(
            f"it does not know the route or the model: 404{code}; see upstream.url, upstream.model"
        )
    if 300 <= status < 400:
        return EngineFault(f"it redirects ({status}); name the final address in upstream.url")
    if 400 <= status < 500:
        return RowFault(f"it refuses this request: {status}{code}")
    return EngineFault(f"it answers {status}{code}")


def _code(body: bytes) -> str:
    try:
        fields = json.loads(body[:MAX_ERROR_BYTES])
    except (ValueError, RecursionError):
        return ""
    error = fields.get("error", fields) if isinstance(fields, dict) else None
    return named(error)


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds, at most LONGEST_PAUSE_S; None = not told, or not understood."""
    found = _number(headers.get("Retry-After-Ms", ""))
    if found is not None:
        return min(LONGEST_PAUSE_S, found / 1000)
    given = headers.get("Retry-After", "")
    found = _number(given)
    if found is None and given:
        try:
            at = parsedate_to_datetime(given)
        except ValueError:
            return None
        if at.tzinfo is None:
            at = at.replace(tzinfo=timezone.utc)
        found = max(0.0, (at - now).total_seconds())
    return None if found is None else min(LONGEST_PAUSE_S, found)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
