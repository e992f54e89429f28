"""Request bodies of the OpenAI surface: JSON bytes -> typed body -> Draft.

Pure. What would change the answer and cannot be done is refused by name; what is harmless is
ignored and reported by name. Ranges and lengths are prepare's business.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from edged.errors import RequestError
from edged.ingress.http.unsupported import NEUTRAL
from edged.ingress.messages import Message, invalid
from edged.ingress.prepare import Draft, Fields

MAX_TOP_LOGPROBS = 20
MAX_REPORTED_NAMES = 16


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ChatBody(Fields, frozen=True, kw_only=True):
    messages: list[Message]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def draft(self) -> Draft:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise invalid("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        wanted = self.max_completion_tokens  # the newer name wins
        return Draft(
            **_shared(self),
            messages=self.messages,
            max_tokens=self.max_tokens if wanted is None else wanted,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
            tool_choice=self.tool_choice,
            response_format=self.response_format,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )


class CompletionBody(Fields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    def draft(self) -> Draft:
        return Draft(
            **_shared(self),
            prompt=_one_prompt(self.prompt),
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            response_format=self.response_format,
        )


Body = TypeVar("Body", bound=ChatBody | CompletionBody)


def _shared(body: Fields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in Fields.__struct_fields__}


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """A string, a list of one string, a list of ids or a list of one list of ids."""
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return ids
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    if ids or not prompt:
        raise invalid("prompt", "must be a string, a list of one string or a list of token ids")
    message = "prompt: one prompt per request; send several requests, they are batched"
    raise RequestError("unsupported_parameter", message, "prompt")


def decode(data: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The typed body and the names of the fields that are ignored.

    Raises RequestError: invalid_json, invalid_request (param = the field's path) or
    unsupported_parameter.
    """
    fields = _parse(data)
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            continue
        if name in NEUTRAL and not _is_neutral(value, NEUTRAL[name]):
            message = f"{name}: not supported here; leave it out"
            raise RequestError("unsupported_parameter", message, name)
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:  # what the standard parser is milder about
        raise _not_json(str(error)) from None
    known = {*body.__struct_fields__, *NEUTRAL}
    ignored = [name for name in fields if name not in known][:MAX_REPORTED_NAMES]
    return body, tuple(name[:64] for name in ignored)


def _parse(data: bytes) -> dict[str, Any]:
    """Plain JSON, strictly: UTF-8, no NaN, no name twice in one object, no endless nesting."""
    try:
        fields = json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse
        )
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _not_json(f"{error.msg} at {where}") from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _not_json("a number in it is too long") from None
    if not isinstance(fields, dict):
        raise RequestError("invalid_request", "the body must be a JSON object")
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _not_json(f"the name {twice[:64]!r} occurs twice in one object")
    return fields


def _refuse(constant: str) -> None:
    raise _not_json(f"{constant} is not JSON")


def _not_json(why: str) -> RequestError:
    return RequestError("invalid_json", f"the body is not valid JSON: {why[:1].lower()}{why[1:]}")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def _wrong_type(message: str) -> RequestError:
    """msgspec ends its messages with a path: "... - at `$.messages[0].content`"."""
    text, _, path = message.partition(" - at `$")
    param = path.strip("`.")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return invalid(f"{param}.{missing[1]}".lstrip("."), "is missing")
    return invalid(param or "body", f"{text[:1].lower()}{text[1:]}")
