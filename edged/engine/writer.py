"""Writer: turns the token ids of one stream into text, in the daemon, so it survives a worker.

Owns detokeniser, stop strings, token count and the ids generated so far. It never waits and
never talks to an engine; whoever feeds it acts on the finish it returns.
"""

from __future__ import annotations

from typing import Literal

from edged.core import Delta, Request, Step, TokenLogprob
from edged.text.model import TextModel
from edged.text.stops import StopMatcher


class Writer:
    """Text side of one stream. After `finish` is set, further steps are ignored."""

    def __init__(self, request: Request, text: TextModel) -> None:
        self.generated: list[int] = []
        self.cached_tokens = 0
        self.finish: Literal["stop", "length"] | None = None
        self._detokenizer = text.detokenizer(request.prompt_ids)
        self._stops = StopMatcher(request.stop)
        self._has_stops = bool(request.stop)
        # Logprobs wait with their text, which may turn out to be part of a stop string.
        self._held: list[tuple[TokenLogprob, int]] = []  # (logprob, characters of its token)
        self._credit = 0  # characters shown whose tokens' logprobs are not

    def feed(self, step: Step) -> Delta | None:
        """Take one engine step; return what may be shown now, or None."""
        if self.finish is not None:
            return None
        if step.cached_tokens is not None:
            self.cached_tokens = step.cached_tokens
        text, logprobs, ids = "", [], []
        for index, token_id in enumerate(step.token_ids):
            self.generated.append(token_id)
            ids.append(token_id)
            piece = self._detokenizer.push((token_id,))
            if step.logprobs:
                self._held.append((step.logprobs[index], len(piece)))
            if piece and self._has_stops:
                piece, stopped = self._stops.push(piece)
                self.finish = "stop" if stopped else None
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
