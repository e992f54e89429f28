"""Log probabilities as OpenAI's two APIs write them, taken back to ours. Pure and bounded."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from edged.core import TokenLogprob

_Item = TypeVar("_Item")
_MOST_RIVALS = 20
_LEAST = -9999.0  # OpenAI's word for a token that could not be drawn


class _Rival(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _Token(_Rival, frozen=True):
    top_logprobs: list[_Rival] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """content: as in chats; the others as in completions."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


def token_logprobs(found: Logprobs) -> tuple[TokenLogprob, ...]:
    """Tokens by their bytes; what is malformed in one of them counts as not told."""
    if found.content is not None:
        return tuple(
            TokenLogprob(
                _bytes(one),
                _number(one.logprob),
                tuple((_bytes(r), _number(r.logprob)) for r in _few(one.top_logprobs or ())),
            )
            for one in found.content
        )
    return tuple(
        TokenLogprob(
            _utf8(token),
            _number(logprob),
            tuple((_utf8(rival), _number(value)) for rival, value in _few((top or {}).items())),
        )
        for token, logprob, top in itertools.zip_longest(
            found.tokens or (), found.token_logprobs or (), found.top_logprobs or ()
        )
        if token is not None
    )


def after(logprobs: Sequence[TokenLogprob], dropped_chars: int) -> tuple[TokenLogprob, ...]:
    """Without the tokens at the beginning whose text is all among the dropped characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for index, one in enumerate(logprobs):
        token = one.token_id if isinstance(one.token_id, bytes) else b""
        dropped_chars -= len(decoder.decode(token))
        if dropped_chars < 0:
            return tuple(logprobs[index:])
    return ()


def _bytes(one: _Rival) -> bytes:
    if one.bytes is not None and all(0 <= byte < 256 for byte in one.bytes):
        return bytes(one.bytes)
    return _utf8(one.token)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _number(value: float | None) -> float:
    return _LEAST if value is None or not value >= _LEAST else min(0.0, value)


def _few(items: Iterable[_Item]) -> Iterable[_Item]:
    return itertools.islice(items, _MOST_RIVALS)
