"""Which submitted streams cannot run, and why, in words. Pure."""

from __future__ import annotations

import math

from edged.wire import Submit
from edged.worker.contract import ModelSpec

MAX_LOGPROBS = 128  # with MAX_SLOTS it keeps every report far below the frame limit
MAX_SLOTS = 256


def refusal(ask: Submit, spec: ModelSpec) -> str:
    """Empty when the stream can run."""
    if not ask.tokens:
        return "tokens: must not be empty"
    if not 1 <= ask.prompt_tokens <= len(ask.tokens):
        return f"prompt_tokens: {ask.prompt_tokens} is not within 1..{len(ask.tokens)}"
    if min(ask.tokens) < 0 or max(ask.tokens) >= spec.vocab_tokens:
        return f"tokens: an id is outside 0..{spec.vocab_tokens - 1} of model {spec.name}"
    if len(ask.tokens) > spec.context_tokens:
        return (
            f"tokens: {len(ask.tokens)} ids exceed the context of {spec.context_tokens}; "
            "shorten the prompt"
        )
    if not -1 <= ask.logprobs <= min(MAX_LOGPROBS, spec.vocab_tokens):
        return f"logprobs: {ask.logprobs} is not within -1..{MAX_LOGPROBS}"
    return _sampling(ask)


def _sampling(ask: Submit) -> str:
    for name in (
        *("temperature", "top_p", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty"),
    ):
        if not math.isfinite(getattr(ask, name)):
            return f"{name}: must be a finite number"
    if not 0 < ask.top_p <= 1:
        return f"top_p: {ask.top_p} is not within 0..1 (0 excluded)"
    if not 0 <= ask.min_p <= 1:
        return f"min_p: {ask.min_p} is not within 0..1"
    if ask.repetition_penalty <= 0:
        return f"repetition_penalty: {ask.repetition_penalty} is not above 0"
    return ""


def finish_at_once(ask: Submit, spec: ModelSpec) -> bool:
    """A continued stream that has already said all it may: nothing is left to draw."""
    done = len(ask.tokens) - ask.prompt_tokens
    return done >= ask.max_tokens or len(ask.tokens) >= spec.context_tokens
