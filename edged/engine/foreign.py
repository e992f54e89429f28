"""ForeignEngine: an engine of this node whose model has another tokenizer than the requests.

Renders the words behind a request with its own model's template, reads what is written so far as
the beginning of its own answer, and gives text back. The engine inside keeps its own life.
"""

from __future__ import annotations

import asyncio
import dataclasses

from edged.core import Chat, Health, Request, Step, TokenLogprob
from edged.engine import Engine, Run
from edged.errors import EngineBusy, EngineFault, RequestError, RowFault
from edged.text.continuation import continued
from edged.text.model import TextModel


class ForeignEngine:
    """See edged.engine.TextEngine. context_tokens: of one sequence of the engine inside."""

    def __init__(self, engine: Engine, text: TextModel, context_tokens: int) -> None:
        self.name = engine.name
        self.model = engine.model
        self.engine = engine
        self.text = text
        self.context_tokens = context_tokens
        self.preparing: set[ForeignRun] = set()  # have a slot, but not yet their ids

    def capacity(self) -> int:
        return max(0, self.engine.capacity() - len(self.preparing))

    def health(self) -> Health:
        return self.engine.health()

    def unsuited(self, request: Request, begun: bool) -> str:
        if request.source is None:
            return "prompt"  # ids of another vocabulary
        return "messages" if isinstance(request.source, Chat) and self.text.chat_problem else ""

    def run_text(self, request: Request, written: str) -> Run:
        if self.health().state != "ready":
            raise EngineFault(f"engine {self.name} is not ready: {self.health().detail}")
        if self.capacity() <= 0:
            raise EngineBusy(f"engine {self.name} has no free slot")
        run = ForeignRun(self, request, written)
        self.preparing.add(run)
        return run


class ForeignRun:
    """Async iterator of Steps with text (see edged.engine.Run)."""

    def __init__(self, engine: ForeignEngine, request: Request, written: str) -> None:
        self._engine = engine
        self._request = request
        self._written = written
        self._run: Run | None = None
        self._closed = False
        self._tokens = 0
        self._detokenizer = engine.text.detokenizer()

    def __aiter__(self) -> ForeignRun:
        return self

    async def __anext__(self) -> Step:
        if self._run is None:
            self._run = await self._begin()
        return self._in_text(await self._run.__anext__())

    async def _begin(self) -> Run:
        """Raises RowFault when the model cannot take the words."""
        request, text = self._request, self._engine.text
        if request.source is None:
            raise RowFault("the request brought ids of another tokenizer")
        try:
            prompt, prefix = await continued(text, request.source, self._written)
        except RequestError as error:
            raise RowFault(f"model {text.name} cannot go on: {error.message}") from None
        if self._closed:  # whoever closes cancels the reader, too
            raise asyncio.CancelledError
        self._engine.preparing.discard(self)
        room = self._engine.context_tokens - len(prompt) - len(prefix)
        if room < 1:
            raise RowFault(
                f"prompt and answer have {len(prompt) + len(prefix)} tokens of model {text.name}, "
                f"whose context holds {self._engine.context_tokens}"
            )
        most = len(prefix) + min(room, request.max_tokens)
        ask = dataclasses.replace(request, prompt_ids=prompt, max_tokens=most)
        return self._engine.engine.run(ask, prefix)

    def _in_text(self, step: Step) -> Step:
        self._tokens += len(step.token_ids)
        text = self._detokenizer.push(step.token_ids)
        if step.finish is not None:
            text += self._detokenizer.flush()
        return Step(
            logprobs=tuple(map(self._by_bytes, step.logprobs)),
            text=text,
            tokens=self._tokens,
            finish=step.finish,
            cached_tokens=step.cached_tokens,
        )

    def _by_bytes(self, one: TokenLogprob) -> TokenLogprob:
        """The same with its tokens' bytes in place of ids that mean something here only."""

        def plain(token: int | bytes) -> bytes:
            return token if isinstance(token, bytes) else self._engine.text.token_bytes(token)

        top = tuple((plain(token), logprob) for token, logprob in one.top)
        return TokenLogprob(plain(one.token_id), one.logprob, top)

    @property
    def inner(self) -> Run | None:
        """The run that writes; None before it has begun."""
        return self._run

    def close(self) -> None:
        self._closed = True
        self._engine.preparing.discard(self)
        if self._run is not None:
            self._run.close()
