"""What a client's words become before a chat template sees them.

Checks every string once: only plain JSON values and only valid Unicode go on. Lone surrogates
never pass, because inside a template they stand for control tokens (see marks.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edged.core import ChatMessage
from edged.errors import RequestError

__all__ = ["ChatMessage", "Habits", "TemplateValues", "checked_text"]

_MAX_DEPTH = 64
# Checking costs about a microsecond per value, on the loop.
_MAX_VALUES = 20_000
# What a message costs beside its strings when deciding whether a prompt is long.
_MESSAGE_CHARS = 64


@dataclass(frozen=True)
class Habits:
    """What a template takes for granted about tool calls.

    argument_objects: arguments are objects, not JSON text. null_content: the absent text of a
    message with tool calls is none, not "".
    """

    argument_objects: bool = True
    null_content: bool = False


class TemplateValues:
    """Turns the values of one request into fresh plain ones. chars: characters seen so far."""

    def __init__(self, habits: Habits = Habits()) -> None:
        self.chars = 0
        self._habits = habits
        self._values = 0

    def message(self, message: ChatMessage, where: str) -> dict[str, Any]:
        """The object a template sees. Absent fields are left out."""
        self.chars += _MESSAGE_CHARS
        no_text = None if message.tool_calls and self._habits.null_content else ""
        content = no_text if message.content is None else message.content
        fields: dict[str, object] = dict(message.extra or {})
        fields |= {"role": message.role, "content": content}
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            change = _opened if self._habits.argument_objects else _closed
            fields["tool_calls"] = [change(call) for call in message.tool_calls]
        return {key: self.plain(value, f"{where}.{key}") for key, value in fields.items()}

    def plain(self, value: object, where: str, depth: int = 0) -> Any:
        """A deep copy of JSON values. Raises RequestError naming the field otherwise."""
        self._values += 1
        if self._values > _MAX_VALUES:
            raise RequestError("invalid_request", f"more than {_MAX_VALUES} values", where)
        if isinstance(value, str):
            self.chars += len(value)
            return checked_text(value, where)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth >= _MAX_DEPTH:
            raise RequestError("invalid_request", f"nested deeper than {_MAX_DEPTH} levels", where)
        if isinstance(value, Mapping):
            return {
                self.plain(key, where, depth + 1): self.plain(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [
                self.plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
        raise RequestError("invalid_request", f"not a JSON value: {type(value).__name__}", where)


def checked_text(text: str, where: str) -> str:
    """The same text as a plain str. Raises RequestError if it is not valid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise RequestError(
                "invalid_request",
                f"invalid Unicode: lone surrogate U+{code:04X} at character {error.start}; "
                "send whole characters (a cut emoji is the usual cause)",
                _shown(where),
            ) from None
    return str(text)


def _shown(where: str) -> str:
    return where.encode("utf-8", "replace").decode("utf-8")


def _opened(call: Mapping[str, object]) -> dict[str, object]:
    """A tool call whose arguments are an object if they are one written as JSON text."""
    function, arguments = _arguments(call)
    if not isinstance(arguments, str):
        return dict(call)
    try:
        opened = json.loads(arguments)
    except (ValueError, RecursionError):
        return dict(call)
    if not isinstance(opened, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": opened}}


def _closed(call: Mapping[str, object]) -> dict[str, object]:
    """A tool call whose arguments are JSON text, as OpenAI's clients send them."""
    function, arguments = _arguments(call)
    if not isinstance(arguments, Mapping):
        return dict(call)
    try:
        text = json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": text}}


def _arguments(call: Mapping[str, object]) -> tuple[Mapping[str, object], object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return {}, None
    return function, function.get("arguments")
