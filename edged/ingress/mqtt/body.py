"""Body: the JSON schema of requests (version 1) and how a payload is read by it.

Pure. Refusals are RequestErrors that name the key and never quote more than a few words.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from edged.errors import RequestError
from edged.ingress.prepare import Fields, Message

VERSION = 1
ID_PATTERN = r"\A[A-Za-z0-9_.:-]{1,64}\Z"
JSON_TYPE = "application/json"
BOM = b"\xef\xbb\xbf"
MAX_ECHO_CHARS = 200  # of the requester's own words in an error

Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]


class Body(Fields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generate or chat request. meta: the requester's own, not looked at."""

    v: int = VERSION
    id: Id | None = None
    reply_to: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=64)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool = False
    ack: bool = False
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 5
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] | None = None
    meta: Annotated[dict[str, Any], msgspec.Meta(max_length=16)] | None = None


class OrderBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cancel or status request; cancel needs the id."""

    v: int = VERSION
    id: Id | None = None
    reply_to: str | None = None
    meta: dict[str, Any] | None = None


class Envelope(msgspec.Struct, frozen=True):
    """Just enough of any body, good or bad, to know where its answer belongs."""

    id: Any = None
    reply_to: Any = None


_B = TypeVar("_B", Body, OrderBody)


def envelope(payload: bytes) -> Envelope:
    """Empty when the payload is no JSON object; what is wrong with it is told elsewhere."""
    try:
        return msgspec.json.decode(payload.removeprefix(BOM), type=Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Envelope()


def is_id(value: object) -> bool:
    try:
        msgspec.convert(value, Id)
    except msgspec.ValidationError:
        return False
    return True


def text_of(payload: bytes) -> str:
    """Raises RequestError when the payload is not UTF-8."""
    try:
        return payload.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"the payload is not UTF-8 text (byte {error.start}); send UTF-8"
        raise RequestError("invalid_request", why) from None


def body_of(text: str, content_type: str | None, plain_text: bool) -> Body:
    """A JSON object, or plain text as the prompt. Raises RequestError."""
    if text.lstrip().startswith("{"):
        return decode(text, Body)
    if content_type == JSON_TYPE:
        raise RequestError("invalid_json", "the payload is not a JSON object")
    if not plain_text:
        why = "the payload is not a JSON object and plain text is switched off (mqtt.plain_text)"
        raise RequestError("invalid_request", why)
    if not text.strip():
        raise RequestError("invalid_request", "prompt: must not be empty", "prompt")
    return Body(prompt=text)


def decode(text: str, kind: type[_B]) -> _B:
    """Raises RequestError: invalid_json, or invalid_request naming the key."""
    try:
        body = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        why = f"the payload is not valid JSON: {_lower(str(error)[:MAX_ECHO_CHARS])}"
        raise RequestError("invalid_json", why) from None
    if body.v != VERSION:
        raise RequestError("invalid_request", f"v: this node speaks version {VERSION}", "v")
    return body


def _explained(message: str) -> RequestError:
    """msgspec ends its messages with a path such as `$.priority`: put the key in front."""
    text, _, path = message.partition(" - at `$")
    text, path = text[:MAX_ECHO_CHARS], path[:MAX_ECHO_CHARS]
    unknown = text.partition("unknown field `")[2].rstrip("`")
    key = ".".join(part for part in (path.strip("`."), unknown) if part)
    if unknown:
        why = f"{key}: unknown key; remove it (`meta` is free for your own)"
    elif path == ".id`":
        why = "id: use 1 to 64 characters of A-Z, a-z, 0-9, _ . : and -"
    else:
        why = f"{key}: {_lower(text)}" if key else _lower(text)
    return RequestError("invalid_request", why, key or None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
