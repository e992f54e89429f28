"""UpstreamRun: one stream at the upstream server, from the POST to its last event.

Closing the connection is the cancellation. Every way it can fail is a fault with a name.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import aiohttp

from edged.core import Step, TokenLogprob
from edged.engine.upstream.asking import Ask, Seam
from edged.engine.upstream.client import Client, in_words
from edged.engine.upstream.events import DONE, Characters, Events, piece
from edged.engine.upstream.logprobs import after
from edged.errors import EdgedError, EngineFault, RowFault

T = TypeVar("T")

_USAGE_WITHIN_S = 2.0  # after the last token: the usage follows at once or not at all
_MOST_CHARS_PER_TOKEN = 256  # a server that sends more does not keep to max_tokens
FINISHES: dict[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}


class UpstreamRun:
    """Async iterator of Steps with text (see edged.engine.Run).

    ended: called once, when the slot is free again, with the fault if there was one.
    """

    def __init__(
        self, client: Client, ask: Ask, ended: Callable[[EdgedError | None], None]
    ) -> None:
        self._client = client
        self._ask = ask
        self._ended = ended
        self._response: aiohttp.ClientResponse | None = None
        self._deadline_s = asyncio.get_running_loop().time() + client.settings.first_token_timeout_s
        self._waits_for = "the first token"
        self._events = Events()
        self._characters = Characters()
        self._seam = Seam(ask.blanks)
        self._room_chars = _MOST_CHARS_PER_TOKEN * ask.body["max_tokens"]
        self._text = ""  # not taken yet
        self._logprobs: tuple[TokenLogprob, ...] = ()  # of that text
        self._first = True  # no text has come yet
        self._tokens: int | None = None
        self._finish: Literal["stop", "length"] | None = None
        self._done = False  # nothing more is to be read
        self.served = False  # up to the end
        self._over = False  # the slot is free

    def __aiter__(self) -> UpstreamRun:
        return self

    async def __anext__(self) -> Step:
        if self._over:
            raise StopAsyncIteration
        try:
            step = await self._next()
        except EdgedError as fault:
            if self._over:
                raise asyncio.CancelledError from None
            self._end(fault)
            raise
        if self._over and not self.served:
            # Closed while it was on its way. Whoever closes cancels the reader, too, but wait_for
            # may swallow that (Python < 3.12).
            raise asyncio.CancelledError
        return step

    def close(self) -> None:
        self._end(None)

    def _end(self, fault: EdgedError | None) -> None:
        if self._over:
            return
        self._over = True
        if self._response is not None:
            self._response.close()  # the connection, not only the answer
        self._ended(fault)

    async def _next(self) -> Step:
        if self._ask.body["max_tokens"] < 1:  # nothing is left to write
            self._finish, self._done = "length", True
        if not self._done and self._response is None:
            self._response = await self._timed(self._client.post(self._ask))
        while not self._done and not self._text:
            await self._read()
        step = Step(text=self._text, tokens=self._tokens, logprobs=self._logprobs)
        self._text, self._logprobs = "", ()
        if not self._done:
            return step
        self.served = True
        self._end(None)
        return dataclasses.replace(step, finish=self._finish)

    async def _read(self) -> None:
        """One read from the connection and what it says."""
        if self._response is None:
            raise EngineFault("there is no answer to read")
        try:
            data = await self._timed(self._response.content.readany())
        except EngineFault:
            if self._finish is None:
                raise
            data = b""  # all text is here, only the usage did not come
        if not data:
            if self._finish is None:
                raise EngineFault("it cut the answer")
            self._done = True
        for event in self._events.feed(data):
            self._take(event)

    def _take(self, event: str) -> None:
        if event.strip() == DONE:
            if self._finish is None:
                raise EngineFault("it ended the answer without a reason")
            self._done = True
        if self._done:
            return
        news = piece(event)
        loop = asyncio.get_running_loop()
        whole = self._characters.push(news.text)
        text = self._seam.push(whole)
        if self._finish is None and text:
            if self._ask.rivals is not None and not news.logprobs and self._first:
                raise RowFault("it sends no log probabilities")
            self._first = False
            self._room_chars -= len(text)
            self._text += text
            fresh = after(news.logprobs, len(whole) - len(text))
            self._logprobs += tuple(
                TokenLogprob(one.token_id, one.logprob, one.top[: self._ask.rivals])
                for one in fresh
            )
        if news.text:
            self._deadline_s = loop.time() + self._client.settings.idle_timeout_s
            self._waits_for = "the next token"
        if news.tokens is not None and 0 <= news.tokens < 1 << 31:
            self._tokens = news.tokens
        if self._room_chars < 0 and self._finish is None:
            self._finish, self._done = "length", True
        if news.finish and self._finish is None:
            self._finish = _finish(news.finish)
            self._deadline_s = loop.time() + _USAGE_WITHIN_S

    async def _timed(self, work: Coroutine[Any, Any, T]) -> T:
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(work, max(0.0, left_s))
        except aiohttp.ClientError as error:  # first: its connect time-out is a TimeoutError too
            raise EngineFault(_in_words(error, self._response is None)) from None
        except asyncio.TimeoutError:
            raise EngineFault(f"it did not send {self._waits_for} in time") from None
        except OSError as error:
            raise EngineFault(_in_words(error, self._response is None)) from None


def _finish(reason: str) -> Literal["stop", "length"]:
    if reason in FINISHES:
        return FINISHES[reason]
    if reason in ("tool_calls", "function_call", "content_filter"):
        raise RowFault(f"it ended the answer with {reason}")
    raise EngineFault("it ended the answer for a reason of its own")


def _in_words(error: Exception, opening: bool) -> str:
    return in_words(error) if opening else f"it cut the answer ({type(error).__name__})"
