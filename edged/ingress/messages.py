"""Messages of a chat as clients write them, turned into what the text model takes.

Pure: content parts are joined, what a text model cannot read is refused by its place in the
body. Never renders a template.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edged.errors import RequestError
from edged.text.messages import ChatMessage

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Part(msgspec.Struct, frozen=True):
    """One piece of a message's content; only type "text" can be served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Raises RequestError with the field's path."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    return [
        ChatMessage(
            # Chat templates know no "developer"; OpenAI's models treat both alike.
            role="system" if message.role == "developer" else message.role,
            content=_content(message, f"messages[{index}].content"),
            name=message.name,
            tool_calls=message.tool_calls or (),
            tool_call_id=message.tool_call_id,
        )
        for index, message in enumerate(messages)
    ]


def _content(message: Message, path: str) -> str | None:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role in ("assistant", "tool"):
            return None
        raise invalid(path, f"a {message.role} message needs text")
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            where = f"{path}[{index}].type"
            why = f"{where}: this model reads text only; send parts of type 'text'"
            raise RequestError("unsupported_content", why, where)
        if part.text is None:
            raise invalid(f"{path}[{index}].text", "is missing")
        texts.append(part.text)
    return "\n".join(texts)


def invalid(param: str, why: str) -> RequestError:
    return RequestError("invalid_request", f"{param}: {why}", param)
