"""The JSON of answers in OpenAI's two dialects: chat completions and text completions.

Pure: takes Deltas and Finishes, gives plain objects. One Reply per request; it keeps only what
a stream's next object depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edged import __version__
from edged.core import Delta, Finish, TokenLogprob
from edged.ingress.http.logprobs import ChatLogprobs, TextLogprobs
from edged.text.model import TextModel

Json = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What all objects of one answer repeat. ignored: request fields without effect."""

    id: str
    created_s: int
    text: TextModel
    with_usage: bool
    with_logprobs: bool
    fingerprint: str
    ignored: tuple[str, ...] = ()

    def object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.text.name,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        made = self.object(kind, choices)
        return made | {"usage": None} if self.with_usage else made


class Reply(Protocol):
    """One dialect's objects for one answer."""

    def opening(self) -> list[Json]: ...

    def delta(self, delta: Delta) -> Json | None: ...

    def closing(self, finish: Finish) -> list[Json]: ...

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> Json: ...


class ChatReply:
    KIND, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = ChatLogprobs(head.text)

    def opening(self) -> list[Json]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, delta: Delta) -> Json | None:
        """None when there is nothing to show: text still held back."""
        logprobs = self._logprobs.of(delta.logprobs) if self._head.with_logprobs else None
        if not delta.text and not logprobs:
            return None
        return self._chunk({"content": delta.text}, logprobs=logprobs)

    def closing(self, finish: Finish) -> list[Json]:
        return _closing(self._head, self.CHUNK, self._chunk({}, finish.reason), finish)

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> Json:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs.of(logprobs) if self._head.with_logprobs else None,
            "finish_reason": finish.reason,
        }
        return _whole(self._head, self.KIND, choice, finish)

    def _chunk(self, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.chunk(self.CHUNK, [choice])


class TextReply:
    KIND = "text_completion"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._logprobs = TextLogprobs(head.text)

    def opening(self) -> list[Json]:
        return []

    def delta(self, delta: Delta) -> Json | None:
        logprobs = self._logprobs.of(delta.logprobs) if self._head.with_logprobs else None
        if not delta.text and not logprobs:
            return None
        return self._head.chunk(self.KIND, [_text_choice(delta.text, logprobs, None)])

    def closing(self, finish: Finish) -> list[Json]:
        last = self._head.chunk(self.KIND, [_text_choice("", None, finish.reason)])
        return _closing(self._head, self.KIND, last, finish)

    def whole(self, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> Json:
        shown = self._logprobs.of(logprobs) if self._head.with_logprobs else None
        return _whole(self._head, self.KIND, _text_choice(text, shown, finish.reason), finish)


def _text_choice(text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _closing(head: Head, kind: str, last: Json, finish: Finish) -> list[Json]:
    """The finish chunk, then the usage chunk if asked for; both carry the extension."""
    extension = {"edged": extension_json(head, finish)}
    if not head.with_usage:
        return [last | extension]
    usage = head.object(kind, []) | {"usage": usage_json(finish)} | extension
    return [last | extension, usage]


def _whole(head: Head, kind: str, choice: Json, finish: Finish) -> Json:
    return head.object(kind, [choice]) | {
        "usage": usage_json(finish),
        "edged": extension_json(head, finish),
    }


def usage_json(finish: Finish) -> Json:
    usage = finish.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def extension_json(head: Head, finish: Finish) -> Json:
    """Which engine wrote what, how long it took, which fields had no effect."""
    extension: Json = {
        "engines": [
            {
                "name": span.name,
                "model": span.model,
                "from_token": span.from_token,
                "to_token": span.to_token,
                "reason": span.reason,
                "approximate": span.approximate,
            }
            for span in finish.engines
        ],
        "timings": {
            "queue_ms": _ms(finish.timings.queue_s),
            "first_token_ms": _ms(finish.timings.first_token_s),
            "total_ms": _ms(finish.timings.total_s),
        },
    }
    return extension | {"ignored": list(head.ignored)} if head.ignored else extension


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def fingerprint(text: TextModel) -> str:
    """Changes when the same seed may give another answer: with the version or the model."""
    what = f"{__version__} {text.name} {text.tokenizer_hash}"
    return "fp_" + hashlib.sha256(what.encode()).hexdigest()[:10]
