"""prepare: a Draft (what a client wrote, typed) becomes a Request (checked and tokenised).

Shared by HTTP and MQTT, so that both refuse the same things with the same words: every refusal
is a RequestError that names the field. Never touches the scheduler, never logs a prompt.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from edged.core import Chat, Prompt, Request, Sampling
from edged.errors import RequestError
from edged.ingress.catalog import Catalog, Entry
from edged.ingress.messages import Message, Part, chat_messages, invalid
from edged.settings import Generation
from edged.text import continuation
from edged.text.model import TextModel

__all__ = ["Catalog", "Draft", "Entry", "Fields", "Message", "Part", "prepare"]

# name -> (least, greatest, is the least itself allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "top_k": (-1, 1_000_000, True),  # -1 and 0 both mean off
    "min_p": (0, 1, True),
    "repetition_penalty": (0, 2, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "seed": (-(2**63), 2**63 - 1, True),
    "logprobs": (0, 20, True),
}
MAX_STOPS = 4
MAX_STOP_CHARS = 256


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What all request bodies have in common. None = the client did not say."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None


class Draft(Fields, frozen=True, kw_only=True):
    """A request before tokenisation: exactly one of messages and prompt.

    prompt: raw text without a chat template, or token ids. logprobs: None = off, n >= 0 = the
    drawn token and n rivals. response_format, tools, tool_choice: as OpenAI defines them;
    continue_final_message: as vLLM does (the last message is the assistant's and goes on).
    """

    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


async def prepare(
    draft: Draft,
    catalog: Catalog,
    *,
    request_id: str,
    client: str,
    ingress: str,
    now_s: float,
    deadline_s: float | None = None,
    priority: int = 5,
    defaults: Generation | None = None,
    forwarded: bool = False,
) -> Request:
    """Check and tokenise. now_s and deadline_s are loop times. forwarded: see Request.

    defaults: of what the draft leaves out; None = the catalogue's.
    Raises RequestError: model_not_found, invalid_request, unsupported_parameter,
    unsupported_content, context_length_exceeded, template_error, deadline_exceeded.
    """
    if deadline_s is not None and deadline_s <= now_s:
        raise RequestError("deadline_exceeded", "the deadline has already passed")
    if not 0 <= priority <= 9:
        raise invalid("priority", "must be a whole number from 0 to 9")
    entry = catalog.find(draft.model or "")
    defaults = defaults or catalog.defaults
    sampling = _sampling(draft, defaults)
    stop = _stop(draft.stop)
    _refuse_constraints(draft)
    wanted = _wanted_tokens(draft.max_tokens, defaults)
    source = _source(draft)
    ids = await _prompt_ids(draft, source, entry.text)
    room = entry.context_tokens - len(ids)
    if room < 1:
        raise _too_long(draft, len(ids), entry.context_tokens)
    return Request(
        id=request_id,
        model=entry.text.name,
        prompt_ids=ids,
        max_tokens=min(room, wanted),  # clamped: such an answer ends with "length"
        sampling=sampling,
        stop=stop,
        priority=priority,
        client=client,
        ingress=ingress,
        deadline_s=deadline_s,
        source=source,
        forwarded=forwarded,
    )


def _sampling(draft: Draft, defaults: Generation) -> Sampling:
    for name, (least, greatest, inclusive) in RANGES.items():
        value = getattr(draft, name)
        if value is None:
            continue
        # A NaN fails both comparisons.
        if not (least <= value <= greatest and (inclusive or value > least)):
            bound = f"from {least:.9g}" if inclusive else f"above {least:.9g}"
            raise invalid(name, f"must be {bound} to {greatest:.9g}")
    return Sampling(
        temperature=_or(draft.temperature, defaults.temperature),
        top_k=max(0, draft.top_k or 0),
        top_p=_or(draft.top_p, defaults.top_p),
        min_p=draft.min_p or 0.0,
        repetition_penalty=draft.repetition_penalty or 1.0,
        presence_penalty=draft.presence_penalty or 0.0,
        frequency_penalty=draft.frequency_penalty or 0.0,
        seed=random.getrandbits(63) if draft.seed is None else draft.seed % 2**63,
        logprobs=draft.logprobs,
        ignore_eos=bool(draft.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are allowed")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise invalid("stop", f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return stops


def _refuse_constraints(draft: Draft) -> None:
    """What cannot be enforced is refused, not ignored."""
    kind = "text" if draft.response_format is None else draft.response_format.get("type")
    if kind in ("json_object", "json_schema"):
        why = f"response_format: {kind} cannot be enforced yet; leave it out or use 'text'"
        raise RequestError("unsupported_parameter", why, "response_format")
    if kind != "text":
        raise invalid("response_format.type", "must be 'text'")
    if draft.tool_choice == "required" or isinstance(draft.tool_choice, dict):
        why = "tool_choice: a tool call cannot be enforced; use 'auto' or 'none'"
        raise RequestError("unsupported_parameter", why, "tool_choice")
    if draft.tool_choice not in (None, "auto", "none"):
        raise invalid("tool_choice", "must be 'auto' or 'none'")


def _wanted_tokens(max_tokens: int | None, defaults: Generation) -> int:
    if max_tokens is None:
        return defaults.max_tokens
    if max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    return max_tokens


def _too_long(draft: Draft, prompt_tokens: int, context_tokens: int) -> RequestError:
    message = (
        f"the prompt has {prompt_tokens} tokens and the model's context holds {context_tokens}, "
        "the answer included; shorten the prompt"
    )
    field = "messages" if draft.prompt is None else "prompt"
    return RequestError("context_length_exceeded", message, field)


def _source(draft: Draft) -> Chat | Prompt | None:
    """The words; None for token ids."""
    if (draft.messages is None) == (draft.prompt is None):
        raise invalid("messages", "send exactly one of messages and prompt")
    if draft.messages is None:
        return Prompt(draft.prompt) if isinstance(draft.prompt, str) else None
    return Chat(
        tuple(chat_messages(draft.messages)),
        tools=tuple(draft.tools or ()) if draft.tool_choice != "none" else (),
        template_kwargs=draft.chat_template_kwargs or {},
        continue_final=_continues(draft, draft.messages),
    )


def _continues(draft: Draft, messages: list[Message]) -> bool:
    if not draft.continue_final_message:
        if draft.add_generation_prompt is False:
            why = "add_generation_prompt: false needs continue_final_message: true"
            raise RequestError("unsupported_parameter", why, "add_generation_prompt")
        return False
    if draft.add_generation_prompt:
        why = "cannot be true together with continue_final_message"
        raise invalid("add_generation_prompt", why)
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content or len(messages) < 2:
        why = "the last message must be the assistant's, with text, after at least one other"
        raise invalid("continue_final_message", why)
    return True


async def _prompt_ids(
    draft: Draft, source: Chat | Prompt | None, text: TextModel
) -> tuple[int, ...]:
    if source is not None:
        return await continuation.prompt_ids(text, source)
    return _checked_ids([i for i in draft.prompt or () if isinstance(i, int)], text.vocab_tokens)


def _checked_ids(ids: list[int], vocab_tokens: int) -> tuple[int, ...]:
    if not ids:
        raise invalid("prompt", "must hold at least one token")
    if min(ids) < 0 or max(ids) >= vocab_tokens:
        raise invalid("prompt", f"token ids of this model are 0 to {vocab_tokens - 1}")
    return tuple(ids)
