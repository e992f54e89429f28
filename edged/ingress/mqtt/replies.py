"""Replies: the bodies and user properties of everything a requester is sent.

Pure. Every reply is self-sufficient (a 3.1.1 subscriber sees no properties). Version 1 of the
reply schema; types accepted, chunk, final, error, and status for a status request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from edged.core import Finish, Timings
from edged.errors import RequestError
from edged.ingress.mqtt.body import VERSION
from edged.ingress.mqtt.messages import Address, Outgoing

CHUNK_EXPIRY_S = 10  # a late chunk is worthless: the final carries the whole text
ANSWER_EXPIRY_S = 300
STATUS = {"accepted": 202, "chunk": 206, "final": 200, "status": 200}


def accepted(node: str, address: Address, model: str) -> Outgoing:
    return _reply(node, address, "accepted", 0, {"model": model})


def chunk(node: str, address: Address, seq: int, text: str) -> Outgoing:
    return _reply(node, address, "chunk", seq, {"delta": text})


def final(node: str, address: Address, seq: int, model: str, text: str, finish: Finish) -> Outgoing:
    """text: the whole answer. last_seq in it: the number of the last chunk, 0 = there was none."""
    usage = finish.usage
    more = {
        "model": model,
        "text": text,
        "finish_reason": finish.reason,
        "last_seq": max(0, seq - 1),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": _timings(finish.timings),
        "engines": [msgspec.to_builtins(span) for span in finish.engines],
    }
    status = 499 if finish.reason == "cancelled" else STATUS["final"]
    return _reply(node, address, "final", seq, more, status)


def error(node: str, address: Address, seq: int, fault: RequestError) -> Outgoing:
    told: dict[str, Any] = {
        "code": fault.code,
        "message": fault.message,
        "retryable": fault.spec.retryable,
    }
    if fault.param is not None:
        told["param"] = fault.param
    if fault.retry_after_s is not None:
        told["retry_after_ms"] = round(fault.retry_after_s * 1000)
    more: dict[str, Any] = {"error": told}
    if fault.engines:
        more["engines"] = [msgspec.to_builtins(span) for span in fault.engines]
    return _reply(node, address, "error", seq, more, fault.spec.status)


def status(node: str, address: Address, facts: Mapping[str, Any]) -> Outgoing:
    return _reply(node, address, "status", 0, {"status": dict(facts)})


def readdressed(reply: Outgoing, address: Address) -> Outgoing:
    """The same answer for whoever asked again."""
    return replace(reply, correlation=address.correlation, address=address)


def status_of(reply: Outgoing) -> int:
    """The HTTP-like number a reply carries."""
    return int(dict(reply.user)["status"])


def failure(finish: Finish) -> RequestError:
    """The error of a stream that was shed or failed."""
    message = finish.error_message or f"the request ended as {finish.reason}"
    return RequestError(finish.error_code or "internal_error", message, engines=finish.engines)


def fitting(message: Outgoing, node: str, max_packet_bytes: int | None) -> Outgoing | None:
    """The message itself, or what is sent in its place when the broker would not take it.

    A broker drops the whole connection for a packet over its limit.
    """
    if max_packet_bytes is None or message.size_bytes <= max_packet_bytes:
        return message
    if message.address is None:
        return None
    why = (
        f"the answer of {len(message.payload)} bytes is over the broker's packet limit of "
        f"{max_packet_bytes}; ask for fewer max_tokens"
    )
    seq = dict(message.user).get("edged-seq", "0")
    small = error(node, message.address, int(seq), RequestError("payload_too_large", why))
    return small if small.size_bytes <= max_packet_bytes else None


def _timings(timings: Timings) -> dict[str, float | None]:
    """Milliseconds from admission to dispatch, first token, end; null = never happened."""

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 1)

    return {
        "queue_ms": milliseconds(timings.queue_s),
        "first_token_ms": milliseconds(timings.first_token_s),
        "total_ms": milliseconds(timings.total_s),
    }


def _reply(
    node: str, address: Address, kind: str, seq: int, more: dict[str, Any], status: int = 0
) -> Outgoing:
    body = {"v": VERSION, "id": address.id, "node": node, "type": kind, "seq": seq, **more}
    return Outgoing(
        topic=address.topic,
        payload=msgspec.json.encode(body),
        qos=0 if kind == "chunk" else 1,
        transient=kind == "chunk",
        correlation=address.correlation,
        user=(
            ("edged-type", kind),
            ("edged-seq", str(seq)),
            ("request-id", address.id),
            ("status", str(status or STATUS[kind])),
        ),
        content_type="application/json",
        expiry_s=CHUNK_EXPIRY_S if kind == "chunk" else ANSWER_EXPIRY_S,
        address=address,
    )
