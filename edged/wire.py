"""Frames between the daemon and its workers: u32 length (big endian) + msgpack, at most 1 MiB.

A closed set of messages as a tagged union: ids and logprobs, never text. One `Report` per step
carries every stream. The worker opens with `Hello`; the daemon answers with `Launch`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Union

import msgspec

from edged.errors import WireError

VERSION = 2
MAX_FRAME_BYTES = 1 << 20
SELF_TEST_WAIT_S = 30.0
_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all frames."""


# --- daemon -> worker -------------------------------------------------------------------------


class Launch(Message, frozen=True):
    """What to load. model_dir holds model.json; context_tokens caps the model's own context.

    golden_dir: a writable folder for the answers of models that came without a golden one;
    empty = none are recorded.
    """

    engine: str
    model_dir: str
    slots: int
    context_tokens: int
    threads: int
    prefill_chunk: int
    golden_dir: str = ""


class Submit(Message, frozen=True):
    """Start (or continue) one stream.

    tokens: prompt ids followed by the ids generated so far; the first `prompt_tokens` of
    them are the prompt. max_tokens counts generated tokens including those carried over,
    so the index of the next drawn token is len(tokens) - prompt_tokens.
    logprobs: -1 = off, n >= 0 = the drawn token and n rivals.
    """

    stream: int
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int
    ignore_eos: bool


class Cancel(Message, frozen=True):
    """The stream is not wanted any more; answered by an `ended` row with finish "cancelled"."""

    stream: int


class SetLimits(Message, frozen=True):
    max_batch: int
    duty: float
    prefill_chunk: int
    admit: bool


class SelfTest(Message, frozen=True):
    """Run the golden prompt between two steps; answered by one SelfTested.

    It waits at most SELF_TEST_WAIT_S for a free slot, then runs under the deadline of a Phase.
    Running streams lose that moment and nothing else.
    """


class Shutdown(Message, frozen=True):
    """Close the device and exit 0."""


# --- worker -> daemon -------------------------------------------------------------------------


class Hello(Message, frozen=True):
    version: int
    pid: int


class Phase(Message, frozen=True):
    """A promise: the next frame follows within deadline_s, or the worker is judged hung.

    name: "loading", "self_test" or "step". deadline_s 0 = idle, no promise.
    """

    name: str
    deadline_s: float


class Ready(Message, frozen=True):
    """Loaded and warm: what the engine offers."""

    model: str
    vocab_tokens: int
    context_tokens: int
    slots: int
    load_s: float


class Row(Message, frozen=True):
    """News of one stream.

    ids: drawn in this step (empty for a mere end). logprobs: one [chosen, [[id, lp], ...]]
    per id, or empty. finish: "" = goes on, else "stop", "length", "cancelled", "row_fault".
    A row with a finish frees the stream's slot. cached_tokens: -1 except on a first row.
    """

    stream: int
    ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    finish: str
    detail: str
    cached_tokens: int


class Report(Message, frozen=True):
    """One step done. deadline_s: time allowed until the next frame; 0 = idle.

    step_s: wall seconds of the step; kind: "prefill", "decode" or "none" (only ends);
    batch/tokens/context: the shape gear (B, T, S) it ran at; free_slots: after the step.
    """

    rows: list[Row]
    kind: str
    batch: int
    tokens: int
    context: int
    step_s: float
    free_slots: int
    deadline_s: float


class SelfTested(Message, frozen=True):
    """ok False: the engine's output is wrong, detail says where and what differed.

    ran False (with ok True): nothing was tested, detail says why. seconds: the test's own time.
    A Phase follows, for the streams that go on or idle.
    """

    ok: bool
    detail: str
    seconds: float
    ran: bool = True


class Fault(Message, frozen=True):
    """The worker cannot go on and exits; kind: "load", "memory", "self_test", "fatal", "internal".

    detail of "memory" begins with where it was: "load:", "prefill:" or "decode:".
    """

    kind: str
    detail: str


ToWorker = Union[Launch, Submit, Cancel, SetLimits, SelfTest, Shutdown]  # noqa: UP007
ToDaemon = Union[Hello, Phase, Ready, Report, SelfTested, Fault]  # noqa: UP007

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_TO_DAEMON = msgspec.msgpack.Decoder(ToDaemon)


def encode(message: ToWorker | ToDaemon) -> bytes:
    """One frame. Raises WireError above MAX_FRAME_BYTES."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class _Frames:
    """Splits a byte stream into frame bodies; keeps the incomplete tail."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise WireError(f"peer announces a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame not yet complete: at end of file anything but 0 is a WireError."""
        return len(self._buffer)


class WorkerFrames(_Frames):
    """Decodes what a worker receives."""

    def messages(self, data: bytes) -> Iterator[ToWorker]:
        for body in self.feed(data):
            message: ToWorker = _decode(_TO_WORKER, body)
            yield message


class DaemonFrames(_Frames):
    """Decodes what the daemon receives."""

    def messages(self, data: bytes) -> Iterator[ToDaemon]:
        for body in self.feed(data):
            message: ToDaemon = _decode(_TO_DAEMON, body)
            yield message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"unreadable frame: {error}") from None
