"""The words of edged (docs/design: §2), frozen, open to every other module.

Nothing here imports from edged, reads a clock or performs I/O. Times are seconds
of the event loop's clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

EngineKind = Literal["npu", "cpu", "openai"]
FinishReason = Literal["stop", "length", "cancelled", "shed", "failed"]
Mode = Literal["normal", "throttled", "degraded", "draining", "fault"]

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "shed", "failed")
MODES: tuple[Mode, ...] = ("normal", "throttled", "degraded", "draining", "fault")


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Neutral values switch a rule off.

    seed: key of the counter-based generator together with the token's index, so a
    continued stream draws the same numbers on another engine.
    logprobs: None = off, n >= 0 = report the drawn token and the n most likely ones.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off; over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens (OpenAI's definition)
    frequency_penalty: float = 0.0  # over generated tokens (OpenAI's definition)
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation, validated for shape by the ingress.

    content: text (parts already joined); None = no text, as beside tool calls.
    tool_calls: OpenAI's objects ({"id", "type", "function": {"name", "arguments"}}); arguments
    reach the template as an object or as JSON text, whichever it was written for.
    extra: further fields a template may read ("reasoning_content", ...).
    """

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: Sequence[Mapping[str, object]] = ()
    tool_call_id: str | None = None
    extra: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Chat:
    """The conversation behind a Request. continue_final: its last message is the assistant's and
    is to be continued, not answered."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    continue_final: bool = False


@dataclass(frozen=True)
class Prompt:
    """The raw text behind a Request."""

    text: str


@dataclass(frozen=True)
class Request:
    """One generation asked for, validated and tokenised; knows nothing of HTTP or MQTT.

    prompt_ids is never empty; len(prompt_ids) + max_tokens <= the model's context.
    client: key of fair share ("" = anonymous). priority: 0 lowest .. 9 highest.
    deadline_s: loop time after which nobody wants the answer; None = no deadline.
    source: the words that prompt_ids were made of, for engines with another tokenizer; None =
    the client sent ids. Never logged.
    forwarded: another node sent it here because it cannot serve it; it is not sent on.
    """

    id: str
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    priority: int = 5
    client: str = ""
    ingress: str = "http"  # label of metrics: "http" or "mqtt"
    deadline_s: float | None = None
    source: Chat | Prompt | None = field(default=None, repr=False, compare=False)
    forwarded: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one drawn token and of its most likely rivals.

    top: (token id, logprob), most likely first; taken before temperature and penalties.
    An engine whose ids mean nothing here tells a token's bytes in place of its id.
    """

    token_id: int | bytes
    logprob: float
    top: tuple[tuple[int | bytes, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """What one engine reports of one stream: new token ids and perhaps the end.

    Several worker steps may arrive as one Step (deltas coalesce under a slow reader).
    finish: "stop" (end-of-sequence drawn; its id is not in token_ids) or "length".
    logprobs: one per id of token_ids, or empty when not asked for.
    text: new characters, from an engine whose ids mean nothing here (token_ids is empty then).
    tokens: how many tokens such an engine has drawn in this run so far; None = it does not say.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Literal["stop", "length"] | None = None
    cached_tokens: int | None = None  # prompt tokens taken from a slot's cache; on the first Step
    text: str | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a stream: whole characters only. text may be empty when logprobs are not."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that arrived with it; text without ids counts as one."""
        return len(self.token_ids) or int(bool(self.text))


@dataclass(frozen=True)
class EngineSpan:
    """Which engine wrote generated tokens from_token .. to_token (exclusive), and why it began.

    approximate: it went on from the text written so far, not from its ids, so the same seed may
    give other words.
    """

    name: str
    model: str
    from_token: int
    to_token: int
    reason: str = "first"
    approximate: bool = False


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds from admission to: dispatch, first token, end. None = never happened."""

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class Finish:
    """The one event that ends a stream.

    error_code/error_message: set for "shed" and "failed", from the table in errors.py.
    """

    reason: FinishReason
    usage: Usage
    engines: tuple[EngineSpan, ...] = ()
    timings: Timings = field(default_factory=Timings)
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True)
class Limits:
    """Per engine, what the guard allows now; a worker obeys within one step.

    duty: share of wall time the engine may be busy, 0..1. prefill_chunk: tokens.
    """

    max_batch: int
    duty: float = 1.0
    prefill_chunk: int = 64
    admit: bool = True


@dataclass(frozen=True)
class Reading:
    """One plausible sensor sample; a missing figure is None, never 0."""

    source: str
    at_s: float
    temperature_c: float | None = None
    frequency_mhz: float | None = None
    power_w: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True)
class Health:
    """One engine's state in words, for status, readiness and dispatch.

    state: "off" (not started or out of restarts for now), "starting", "ready", "failed".
    rung: the launch configuration, in words; reason: why the last one was left; next_climb_s: loop
    time before which none is climbed. memory: the last sum that was checked before a load.
    standby: off because it is not needed; it is started when it is. newcomers: False while it
    takes only streams that another engine has lost.
    admits: False while the guard lets nothing new into it. pauses: alive, and soon to serve again
    without anybody's doing; said in `detail` only.
    """

    state: Literal["off", "starting", "ready", "failed"]
    detail: str = ""
    running: int = 0
    slots: int = 0
    restarts: int = 0
    last_progress_s: float | None = None
    rung: str = ""
    rung_number: int = 0  # 0 = the full configuration
    memory: str = ""
    reason: str = ""
    next_climb_s: float | None = None
    standby: bool = False
    newcomers: bool = True
    admits: bool = True
    pauses: bool = False

    @property
    def serves(self) -> bool:
        """Now, or in a moment: nobody need be told of that moment."""
        return self.state == "ready" or self.pauses
