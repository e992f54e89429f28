"""TextModel: one model's text side, as the ingress and the streams see it.

Owns the tokenizer and the chat template of a model directory. Blocks the event loop never:
what is long is tokenised in a thread. Prompts are never logged here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from edged.errors import RequestError
from edged.text.chat import Chat, RenderJob
from edged.text.detokenizer import Detokenizer
from edged.text.loading import load_parts
from edged.text.messages import ChatMessage, checked_text
from edged.text.stops import StopMatcher
from edged.text.tokens import LONG_CHARS, Tokens

__all__ = ["ChatMessage", "Detokenizer", "StopMatcher", "TextModel"]


@dataclass(frozen=True)
class TextModel:
    """What turns text into ids and ids into text, for one model directory.

    vocab_tokens: size of the tokenizer; the graph's vocabulary may be larger (padding).
    tokenizer_hash: equal for two models exactly when ids may pass between their engines.
    chat_problem: why chat_ids would fail for every conversation, in words; "" = it works.
    """

    name: str
    context_tokens: int
    vocab_tokens: int
    eos_ids: frozenset[int]
    tokenizer_hash: str
    chat_problem: str
    _tokens: Tokens
    _chat: Chat
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "text"))

    @classmethod
    def load(
        cls, model_dir: Path, name: str = "", clock: Callable[[], datetime] = datetime.now
    ) -> TextModel:
        """Read model.json and tokenizer.json (about 0.1 s per 50,000 tokens; blocks).

        name: what clients call the model; default: the name in model.json. clock: local time
        for templates that write today's date. Raises ConfigError with the next step.
        """
        card, tokens, chat = load_parts(model_dir, clock)
        return cls(
            name=name or card.name,
            context_tokens=card.context_tokens,
            vocab_tokens=card.vocab_tokens,
            eos_ids=card.eos_ids,
            tokenizer_hash=card.tokenizer_hash,
            chat_problem=chat.problem,
            _tokens=tokens,
            _chat=chat,
        )

    async def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The prompt of a conversation, ready for the model to answer.

        Control tokens come from the template alone; in messages, tools and template_kwargs
        their literals are plain text. Raises RequestError: template_error,
        invalid_request (param names the field).
        """
        job = self._chat.job(messages, tools, template_kwargs, add_generation_prompt)
        if job.chars > LONG_CHARS:
            return await self._off_loop(lambda: self._chat_ids(job))
        return self._chat_ids(job)

    async def prompt_ids(self, text: str) -> tuple[int, ...]:
        """A raw completion prompt: BOS if the model wants one, then the text as plain text.

        Literals of control tokens are not parsed. Raises RequestError("invalid_request") when
        no token comes of it.
        """
        checked_text(text, "prompt")
        if len(text) > LONG_CHARS:
            return await self._off_loop(lambda: self._prompt_ids(text))
        return self._prompt_ids(text)

    def text_ids(self, text: str) -> list[int]:
        """Ids of text that was generated, to go on after it: no BOS, "" gives none.

        Raises RequestError when the text spells a control token.
        """
        return self._tokens.encode(text)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A fresh one per stream; prompt_ids end where the stream begins."""
        return Detokenizer(self._tokens.text_bytes, prompt_ids)

    def token_text(self, token_id: int) -> str:
        """One token alone, for logprobs: U+FFFD for a part of a character, control literals."""
        return self._tokens.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; b"" for an id outside the tokenizer."""
        return self._tokens.token_bytes(token_id)

    async def _off_loop(self, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """One long text at a time: each costs about 100 times its size in memory for a moment."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _chat_ids(self, job: RenderJob) -> tuple[int, ...]:
        with _naming("messages"):
            return _not_empty(tuple(self._chat.ids(job)), "messages")

    def _prompt_ids(self, text: str) -> tuple[int, ...]:
        with _naming("prompt"):
            return _not_empty((*self._tokens.start_ids, *self._tokens.encode(text)), "prompt")


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Refusals from below that do not know the field they speak of get its name."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or where
        raise


def _not_empty(ids: tuple[int, ...], where: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError("invalid_request", f"{where} gives no token; send some text", where)
    return ids
