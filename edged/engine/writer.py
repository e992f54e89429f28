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
        self._held: list[TokenLogprob] = []  # of tokens whose text may belong to a stop string

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
            if step.logprobs:
                self._held.append(step.logprobs[index])
            piece, stopped = self._show(token_id)
            text += piece
            if stopped:
                self.finish = "stop"
                self._held.clear()  # their text was the stop string
                return Delta(text, tuple(ids), tuple(logprobs))
            if self._held and not self._stops.holding:
                logprobs += self._held
                self._held.clear()
        if step.finish is not None:
            text += self._end(step.finish)
            logprobs += self._held
            self._held.clear()
        if not text and not logprobs and not ids:
            return None
        return Delta(text, tuple(ids), tuple(logprobs))

    def _show(self, token_id: int) -> tuple[str, bool]:
        text = self._detokenizer.push((token_id,))
        return self._stops.push(text) if self._has_stops and text else (text, False)

    def _end(self, reason: Literal["stop", "length"]) -> str:
        """Release what was held back; a stop string completed by the last bytes still counts."""
        self.finish = reason
        shown, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            self.finish = "stop"
            return shown
        return shown + self._stops.flush()
