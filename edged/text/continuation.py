"""Continuation: a request's words and the text written so far, in the ids of one model.

Used where ids cannot pass between two engines: the other model renders the prompt with its own
template and reads what is written as the beginning of its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from edged.core import Chat, ChatMessage, Prompt
from edged.text.model import TextModel
from edged.text.tokens import LONG_CHARS


class Continued(NamedTuple):
    """prefix_ids: what is written, as if the model had drawn it after prompt_ids."""

    prompt_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]


async def prompt_ids(text: TextModel, source: Chat | Prompt) -> tuple[int, ...]:
    """Raises RequestError as TextModel.chat_ids and prompt_ids do."""
    if isinstance(source, Prompt):
        return await text.prompt_ids(source.text)
    if not source.continue_final:
        return await _chat_ids(text, source, source.messages)
    *before, last = source.messages
    ids = await _chat_ids(text, source, before)
    return (*ids, *await _text_ids(text, last.content or ""))


async def continued(text: TextModel, source: Chat | Prompt, written: str) -> Continued:
    """Raises RequestError when the model cannot read the words or the text."""
    ids = await prompt_ids(text, source)
    return Continued(ids, await _text_ids(text, written))


async def _chat_ids(
    text: TextModel, source: Chat, messages: Sequence[ChatMessage]
) -> tuple[int, ...]:
    return await text.chat_ids(
        messages, template_kwargs=source.template_kwargs, tools=source.tools or None
    )


async def _text_ids(text: TextModel, written: str) -> tuple[int, ...]:
    if len(written) > LONG_CHARS:
        return tuple(await asyncio.to_thread(text.text_ids, written))
    return tuple(text.text_ids(written)) if written else ()
