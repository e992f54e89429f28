"""Frames an engine sends to its worker, made of the words of core. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edged import wire
from edged.core import Limits, Request


def submit(stream: int, request: Request, prefix: Sequence[int]) -> wire.Submit:
    sampling = request.sampling
    return wire.Submit(
        stream=stream,
        tokens=[*request.prompt_ids, *prefix],
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
    )


def set_limits(limits: Limits) -> wire.SetLimits:
    return wire.SetLimits(limits.max_batch, limits.duty, limits.prefill_chunk, limits.admit)
