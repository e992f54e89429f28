"""Writer: turns the token ids of one stream into text, in the daemon, so it survives a worker.

Owns detokeniser, stop strings, token count, and what is written so far as ids and as text. It
never waits and never talks to an engine; whoever feeds it acts on the finish it returns.
"""

from __future__ import annotations

import codecs
from typing import Literal

from edged.core import Delta, Request, Step, TokenLogprob
from edged.errors import RequestError
from edged.text.model import TextModel
from edged.text.stops import StopMatcher

_COUNTED_CHARS = 16_384  # of a longer text only the beginning is counted, for it blocks the loop


class Writer:
    """Text side of one stream. After `finish` is set, further steps are ignored.

    tokens: drawn so far, by whichever engines. generated: their ids, as long as all came from
    engines of the request's own tokenizer (by_ids).
    """

    def __init__(self, request: Request, text: TextModel) -> None:
        self.generated: list[int] = []
        self.tokens = 0
        self.by_ids = True
        self.cached_tokens = 0
        self.finish: Literal["stop", "length"] | None = None
        self._model = text
        self._detokenizer = text.detokenizer(request.prompt_ids)
        self._stops = StopMatcher(request.stop)
        self._has_stops = bool(request.stop)
        self._pieces: list[str] = []  # all whole characters, shown or held back
        self._before = 0  # tokens before the engine that writes now
        self._told = 0  # tokens that are sure
        self._uncounted: list[str] = []  # what was written since without a count
        self._foreign_text = codecs.getincrementaldecoder("utf-8")("replace")
        # Logprobs wait with their text, which may turn out to be part of a stop string.
        self._held: list[tuple[TokenLogprob, int]] = []  # (logprob, characters of its token)
        self._credit = 0  # characters shown whose tokens' logprobs are not

    @property
    def begun(self) -> bool:
        return bool(self._pieces)

    @property
    def written(self) -> str:
        """All characters written, those included that may yet become a stop string. An engine
        that goes on by text starts after them: a character begun but not complete is its own."""
        return "".join(self._pieces)

    def ids(self) -> list[int]:
        """Ids of all that is written, for an engine of the request's own tokenizer.

        Raises RequestError when a text from elsewhere spells a control token.
        """
        if not self.by_ids:
            self.generated = self._model.text_ids(self.written)
            self._detokenizer = self._model.detokenizer()
        return self.generated

    def settle(self) -> None:
        """An engine has ended: where it did not tell its tokens, they are counted by ours."""
        if self._uncounted:
            self.tokens = self._told + self._count("".join(self._uncounted))
            self._uncounted = []
        self._before = self._told = self.tokens
        self._foreign_text.reset()

    def _count(self, text: str) -> int:
        part = text[:_COUNTED_CHARS]
        try:
            count = len(self._model.text_ids(part))
        except RequestError:  # it spells a control token: one per piece is the best guess
            return len(self._uncounted)
        return -(-count * len(text) // len(part)) if part else 0

    def feed(self, step: Step) -> Delta | None:
        """Take one engine step; return what may be shown now, or None."""
        if self.finish is not None:
            return None
        if step.cached_tokens is not None:
            self.cached_tokens = step.cached_tokens
        if step.text is not None:
            return self._feed_text(step, step.text)
        self.by_ids = self.by_ids or bool(step.token_ids)  # after the ids of what was written
        text, logprobs, ids = "", [], []
        for index, token_id in enumerate(step.token_ids):
            self.generated.append(token_id)
            self.tokens += 1
            ids.append(token_id)
            piece = self._detokenizer.push((token_id,))
            if step.logprobs:
                self._held.append((step.logprobs[index], len(piece)))
            piece = self._checked(piece)
            text += piece
            logprobs += self._released(len(piece))
            if self.finish is not None:
                return Delta(text, tuple(ids), tuple(logprobs))
        if step.finish is not None:
            tail = self._end(step.finish)
            text += tail
            logprobs += self._released(len(tail))
        if not text and not logprobs and not ids:
            return None
        return Delta(text, tuple(ids), tuple(logprobs))

    def _feed_text(self, step: Step, piece: str) -> Delta | None:
        if piece and self.by_ids:
            self.by_ids = False
            self._detokenizer = self._model.detokenizer()  # a begun character is drawn anew
        if step.tokens is not None:
            self.tokens = self._told = self._before + step.tokens
            self._uncounted = []
        elif piece:
            self.tokens += 1  # until it is told or counted
            self._uncounted.append(piece)
        for logprob in step.logprobs:
            token = logprob.token_id if isinstance(logprob.token_id, bytes) else b""
            self._held.append((logprob, len(self._foreign_text.decode(token))))
        text = self._checked(piece)
        if self.finish is None and step.finish is not None:
            text += self._end(step.finish)
        if not self._has_stops:  # nothing is held back, whatever a server counts among its tokens
            self._credit = sum(chars for _, chars in self._held)
        logprobs = self._released(len(text))
        return Delta(text, (), tuple(logprobs)) if text or logprobs else None

    def _checked(self, piece: str) -> str:
        """What of it can be shown; sets finish when it completes a stop string."""
        if not piece:
            return piece
        self._pieces.append(piece)
        if self._has_stops:
            piece, stopped = self._stops.push(piece)
            self.finish = "stop" if stopped else None
        return piece

    def _released(self, shown_chars: int) -> list[TokenLogprob]:
        """Logprobs of the tokens whose text is shown in full by now."""
        self._credit += shown_chars
        released: list[TokenLogprob] = []
        while self._held and self._held[0][1] <= self._credit:
            logprob, chars = self._held.pop(0)
            self._credit -= chars
            released.append(logprob)
        if not self._held:
            self._credit = 0
        return released

    def _end(self, reason: Literal["stop", "length"]) -> str:
        """Release what was held back; a stop string completed by the last bytes still counts."""
        self.finish = reason
        shown, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            self.finish = "stop"
            return shown
        return shown + self._stops.flush()
