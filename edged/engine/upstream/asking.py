"""Asking: a Request in the words of an OpenAI-compatible server, and what it cannot be asked.

Pure. Every parameter that changes the answer is sent or makes the server unsuited; sampling
rules that servers switch on by themselves are sent in their neutral form.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from edged.core import Chat, ChatMessage, Request, Sampling

# As a server calls itself in the `owned_by` of its models.
KINDS = {"llamacpp": "llama.cpp", "vllm": "vllm", "sglang": "vllm", "edged": "edged"}
_SEEDS = 2**31  # what all servers take
_MOST_WINDOW_TOKENS = 65_536  # it reserves memory for them
_CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


@dataclass(frozen=True)
class Ask:
    """One POST: path below the base URL and JSON body. blanks: at the end of what is written;
    they are left out of the body, so the answer may begin with them again. rivals: of each
    token, wanted with its log probability; None = no log probabilities."""

    path: str
    body: dict[str, Any]
    blanks: str = ""
    rivals: int | None = None


def unsuited(request: Request, begun: bool, kind: str) -> str:
    """The parameter that a server of this kind cannot do, "" if it can do all.

    begun: something is written already.
    """
    source, sampling = request.source, request.sampling
    if request.forwarded:
        return "X-Edged-Forwarded"  # it would go round in a circle
    if source is None:
        return "prompt"  # token ids mean nothing there
    plain = kind == "openai"
    if plain and (name := _beyond_openai(sampling)):
        return name
    if not isinstance(source, Chat):
        return ""
    if source.tools:
        return "tools"  # it would answer with calls in place of text
    kwargs = source.template_kwargs
    if kwargs and (plain or kwargs.get("enable_thinking")):
        return "chat_template_kwargs"
    if plain and (begun or source.continue_final):
        return "continue_final_message"  # it would begin a new answer
    if kind == "llama.cpp" and not source.continue_final and _ends_with_answer(source):
        return "messages"  # it would continue the answer
    return ""


def _beyond_openai(sampling: Sampling) -> str:
    neutral = Sampling()
    names = ("top_k", "min_p", "repetition_penalty", "ignore_eos")
    return next((n for n in names if getattr(sampling, n) != getattr(neutral, n)), "")


def _ends_with_answer(source: Chat) -> bool:
    return source.messages[-1].role == "assistant"


def ask(request: Request, written: str, kind: str, model: str) -> Ask:
    """written: the answer so far. request.max_tokens: what is left of it."""
    source = request.source
    body = _common(request, written, kind) | {"model": model}
    wanted = request.sampling.logprobs
    if wanted is not None:
        # llama.cpp takes 0 rivals for no log probabilities at all.
        rivals = max(1, wanted) if kind == "llama.cpp" else wanted
        chat = {"logprobs": True, "top_logprobs": rivals}
        body |= chat if isinstance(source, Chat) else {"logprobs": rivals}
    if isinstance(source, Chat):
        return dataclasses.replace(_chat(source, body, written, kind), rivals=wanted)
    given = source.text if source is not None else ""
    sent = written.rstrip()
    return Ask("/completions", body | {"prompt": given + sent}, written[len(sent) :], wanted)


def _chat(source: Chat, body: dict[str, Any], written: str, kind: str) -> Ask:
    messages = [_message(message) for message in source.messages]
    if kind != "openai":
        body = body | {"chat_template_kwargs": {"enable_thinking": False, **source.template_kwargs}}
    # Servers differ in whether they keep blanks at the end of a message that they continue.
    begun = written
    if source.continue_final:
        begun = (messages.pop()["content"] or "") + written
    sent = begun.rstrip()
    if sent:
        messages.append({"role": "assistant", "content": sent})
        body = body | _CONTINUE
        if kind == "llama.cpp":
            body = body | {"echo": False}
    return Ask("/chat/completions", body | {"messages": messages}, begun[len(sent) :])


def _message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {**(message.extra or {})}
    fields |= {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _common(request: Request, written: str, kind: str) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # Not the same numbers again in the second half of an answer.
        "seed": (sampling.seed + len(written)) % _SEEDS,
    }
    # A stop string may have begun in what is written: then only we can see it complete.
    if request.stop and not written:
        body["stop"] = list(request.stop)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if kind == "llama.cpp":
        body |= {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": _window_tokens(request),
        }
    elif kind != "openai":
        body |= {
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        }
    return body


def _window_tokens(request: Request) -> int:
    """How far back llama.cpp's penalties look: over everything, where it would take 64 tokens."""
    sampling = request.sampling
    neutral = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if neutral == (1.0, 0.0, 0.0):
        return 0
    return min(_MOST_WINDOW_TOKENS, 2 * (len(request.prompt_ids) + request.max_tokens))


class Seam:
    """Drops the blanks at the beginning of a continuation that are written already."""

    def __init__(self, blanks: str) -> None:
        self._blanks = blanks

    def push(self, text: str) -> str:
        if not self._blanks or not text:
            return text
        same = 0
        while same < min(len(text), len(self._blanks)) and text[same] == self._blanks[same]:
            same += 1
        # Anything else ends the seam; a text used up may go on in the next piece.
        self._blanks = self._blanks[same:] if same == len(text) else ""
        return text[same:]
