"""Log probabilities in OpenAI's two formats. Pure.

Logarithms below -9999 (a token that could not be drawn) are shown as -9999, as OpenAI does,
since JSON has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from edged.core import TokenLogprob
from edged.text.model import TextModel

FLOOR = -9999.0


class ChatLogprobs:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def of(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None for no tokens."""
        if not logprobs:
            return None
        content = [
            self._token(one.token_id, one.logprob)
            | {"top_logprobs": [self._token(*rival) for rival in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int | bytes, logprob: float) -> dict[str, Any]:
        data = _bytes(self._text, token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(FLOOR, logprob),
            "bytes": list(data),
        }


class TextLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}; counts characters onward."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            # A token that ends in mid-character: the character counts with its last token.
            self._offset += len(self._decoder.decode(_bytes(self._text, one.token_id)))
        return {
            "tokens": [_shown(self._text, one.token_id) for one in logprobs],
            "token_logprobs": [max(FLOOR, one.logprob) for one in logprobs],
            "top_logprobs": [self._rivals(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _rivals(self, one: TokenLogprob) -> dict[str, float] | None:
        """Two tokens may read alike (halves of characters): the likelier one is shown."""
        if not one.top:
            return None
        shown: dict[str, float] = {}
        for token_id, logprob in one.top:
            shown.setdefault(_shown(self._text, token_id), max(FLOOR, logprob))
        return shown


def _bytes(text: TextModel, token_id: int | bytes) -> bytes:
    return token_id if isinstance(token_id, bytes) else text.token_bytes(token_id)


def _shown(text: TextModel, token_id: int | bytes) -> str:
    return _bytes(text, token_id).decode("utf-8", "replace")
