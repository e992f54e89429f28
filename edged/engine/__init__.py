"""Engines: what can run Requests. This file is the seam; implementations lie beside it.

An engine never queues (the scheduler does). All methods but start and stop are plain `def`:
state changes at once, waiting happens in the returned `Run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from edged.core import Health, Limits, Request, Step


class Run(Protocol):
    """One stream on one engine: an async iterator of Steps, the last of which has `finish`.

    Raises RowFault (this stream's trouble) or EngineFault (everybody's). close() is the
    cancellation: the slot is free within one step. Idempotent, harmless after the end.
    """

    def __aiter__(self) -> Run: ...

    async def __anext__(self) -> Step: ...

    def close(self) -> None: ...


class Engine(Protocol):
    name: str
    model: str

    def capacity(self) -> int:
        """Slots free now; 0 unless the engine is ready."""

    def run(self, request: Request, prefix: Sequence[int]) -> Run:
        """Start the request, continuing after `prefix` (ids already generated elsewhere).

        Takes a slot at once. Raises EngineFault when the engine is not ready.
        """

    def set_limits(self, limits: Limits) -> None: ...

    def health(self) -> Health: ...

    async def start(self) -> None:
        """Return when ready. Raises EngineFault when it cannot start."""

    async def stop(self) -> None: ...


@runtime_checkable
class TextEngine(Protocol):
    """An engine whose token ids mean nothing here: another tokenizer, or another machine.

    It takes words (Request.source) and text written so far, and its Steps carry text.
    """

    name: str
    model: str

    def capacity(self) -> int: ...

    def health(self) -> Health: ...

    def unsuited(self, request: Request, begun: bool) -> str:
        """What it cannot do of the request, as the parameter's name; "" = it can do all.

        begun: something is written already.
        """

    def run_text(self, request: Request, written: str) -> Run:
        """Start the request, going on after `written`; max_tokens is what is left to write.

        Takes a slot at once. Raises EngineFault when the engine is not ready, EngineBusy when it
        has no slot.
        """


Link = Engine | TextEngine  # of the chain


def by_text(engine: Link) -> TextEngine | None:
    """The engine if it is one by text. Asked for each waiting stream: isinstance would be slow."""
    return cast(TextEngine, engine) if hasattr(engine, "run_text") else None
