"""Server-sent events and their chunks of an answer: bytes to Pieces. Pure and bounded.

What does not follow the format is an EngineFault; none of its words are repeated.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass

import msgspec

from edged.core import TokenLogprob
from edged.engine.upstream.logprobs import Logprobs, token_logprobs
from edged.errors import EngineFault

MAX_EVENT_BYTES = 1 << 20
DONE = "[DONE]"
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,47}")
_LINE_END = re.compile(r"\r\n|\n|\r")


class Events:
    """The data of each event, from bytes in any pieces. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # of an unfinished line
        self._data: list[str] = []
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """Raises EngineFault for an event beyond MAX_EVENT_BYTES."""
        text = self._rest + self._decoder.decode(data)
        # A \r at the end may be the first half of \r\n.
        held = "\r" if text.endswith("\r") else ""
        *lines, rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest = rest + held
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise EngineFault(f"it sent an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: str) -> str | None:
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
                self._size += len(value)
            return None
        event = "\n".join(self._data) if self._data else None
        self._data, self._size = [], 0
        return event


@dataclass(frozen=True)
class Piece:
    """What one event says. finish: OpenAI's word. tokens: drawn so far, where it tells.
    logprobs: of the tokens of this text, by their bytes."""

    text: str = ""
    finish: str | None = None
    tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


def piece(event: str) -> Piece:
    """Raises EngineFault for an error event and for what is no chunk of an answer."""
    try:
        # The standard parser, for it lets half a surrogate pair pass (see Characters).
        fields = json.loads(event)
        chunk = msgspec.convert(fields, _Chunk)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise EngineFault("it sent an event that is no chunk of an answer") from None
    if chunk.error is not None:
        raise EngineFault(f"it gave up in mid-answer{named(chunk.error)}")
    tokens = chunk.usage.completion_tokens if chunk.usage else None
    for choice in chunk.choices or ():
        if choice.index == 0:
            text = choice.text if choice.delta is None else choice.delta.content
            logprobs = token_logprobs(choice.logprobs) if choice.logprobs else ()
            return Piece(text or "", choice.finish_reason, tokens, logprobs)
    return Piece(tokens=tokens)


def named(error: object) -> str:
    """ " (code)" of an error object where it is a plain word: its message may quote a prompt."""
    if not isinstance(error, dict):
        return ""
    for key in ("code", "type"):
        word = str(error.get(key) or "")
        if _WORD.fullmatch(word):
            return f" ({word})"
    return ""


class Characters:
    """Whole characters: joins a surrogate pair that was cut between two events."""

    def __init__(self) -> None:
        self._half = ""

    def push(self, text: str) -> str:
        text = self._half + text
        self._half = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
        text = text[: len(text) - len(self._half)]
        if text.isascii():
            return text
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
