"""Protocol: a received message becomes a Call, an Order or a Refusal, with a safe address.

Pure and total: any bytes give one of the three, never an exception. Owns the order in which a
reply topic is chosen. Never submits, publishes or logs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from edged.errors import RequestError
from edged.ingress.mqtt.body import (
    Body,
    Envelope,
    OrderBody,
    body_of,
    decode,
    envelope,
    is_id,
    text_of,
)
from edged.ingress.mqtt.messages import Address, Incoming
from edged.ingress.mqtt.topics import VERBS, Topics, reply_problem
from edged.ingress.prepare import Draft, Fields, Message

# Above this many times the size limit not even the address inside the body is looked for.
LOOK_FACTOR = 16


@dataclass(frozen=True)
class Rules:
    """What this node accepts."""

    topics: Topics
    reply_allow: tuple[str, ...]
    max_request_bytes: int
    plain_text: bool = True


@dataclass(frozen=True)
class Call:
    """A well-formed generate or chat request.

    lifetime_s: seconds from reception after which nobody wants the answer. digest: of verb and
    payload, tells a repetition from another request under the same id.
    """

    verb: str
    address: Address
    draft: Draft
    stream: bool = False
    ack: bool = False
    priority: int = 5
    lifetime_s: float | None = None
    digest: bytes = b""


@dataclass(frozen=True)
class Order:
    """A cancel (of the request whose id the address bears) or a status request."""

    verb: str
    address: Address


@dataclass(frozen=True)
class Refusal:
    """A request that is answered with an error.

    reason: label of the drop counter: "retained", "reply_topic" or the error's code.
    """

    verb: str
    address: Address
    error: RequestError
    reason: str


def read(message: Incoming, rules: Rules, fresh_id: str) -> Call | Order | Refusal:
    """fresh_id: what the request is called when it brings no id of its own."""
    verb = rules.topics.verb(message.topic)
    address, problem = _address(message, rules, fresh_id)
    if problem is not None:
        error = RequestError("invalid_request", f"reply_to: {problem}", "reply_to")
        return Refusal(verb, address, error, "reply_topic")
    if message.retain:
        why = "a request must not be retained; clear it with an empty retained message"
        return Refusal(verb, address, RequestError("invalid_request", why), "retained")
    try:
        return _read(verb, message, rules, address)
    except RequestError as error:
        return Refusal(verb, address, error, error.code)


def _read(verb: str, message: Incoming, rules: Rules, address: Address) -> Call | Order:
    size, limit = len(message.payload), rules.max_request_bytes
    if size > limit:
        why = f"the payload has {size} bytes; {limit} are allowed"
        raise RequestError("payload_too_large", why)
    if verb not in VERBS:
        known = ", ".join(VERBS)
        raise RequestError("not_found", f"there is no request topic {verb[:32]!r}; use {known}")
    text = text_of(message.payload)
    if verb in ("cancel", "status"):
        order = decode(text, OrderBody) if text.strip() else OrderBody()
        if verb == "cancel" and order.id is None:
            raise RequestError("invalid_request", "id: name the request to cancel", "id")
        return Order(verb, address)
    return _call(verb, message, body_of(text, message.content_type, rules.plain_text), address)


def _address(message: Incoming, rules: Rules, fresh_id: str) -> tuple[Address, str | None]:
    """The address, and what is wrong with the topic the requester chose, if anything.

    1. the Response Topic  2. the body's reply_to  3. the default topic of the id. A bad choice
    is answered on the default topic, which is always safe.
    """
    look = len(message.payload) <= LOOK_FACTOR * rules.max_request_bytes
    found = envelope(message.payload) if look else Envelope()
    named = is_id(found.id)
    name = found.id if named else fresh_id
    default = Address(rules.topics.answer(name), name, message.correlation, named)
    chosen = found.reply_to if message.response_topic is None else message.response_topic  # 1, 2
    if not isinstance(chosen, str):
        return default, None  # 3
    problem = reply_problem(chosen, rules.topics, rules.reply_allow)
    if problem is not None:
        return default, problem
    return Address(chosen, name, message.correlation, named, asked=True), None


def _call(verb: str, message: Incoming, body: Body, address: Address) -> Call:
    if (body.prompt is None) == (body.messages is None):
        why = "prompt: send exactly one of prompt and messages"
        raise RequestError("invalid_request", why, "prompt")
    limits = [message.expiry_s, None if body.deadline_ms is None else body.deadline_ms / 1000]
    return Call(
        verb=verb,
        address=address,
        draft=_draft(verb, body),
        stream=body.stream,
        ack=body.ack,
        priority=body.priority,
        lifetime_s=min((limit for limit in limits if limit is not None), default=None),
        digest=hashlib.sha256(verb.encode() + b"\0" + message.payload).digest(),
    )


def _draft(verb: str, body: Body) -> Draft:
    """On `chat` a prompt is one user message; on `generate` it is raw text to continue."""
    as_message = verb == "chat" and body.prompt is not None
    shared = {name: getattr(body, name) for name in Fields.__struct_fields__}
    return Draft(
        **shared,
        prompt=None if as_message else body.prompt,
        messages=[Message("user", body.prompt)] if as_message else body.messages,
        max_tokens=body.max_tokens,
        response_format=body.response_format,
        chat_template_kwargs=body.chat_template_kwargs,
    )
