"""Admission, queue and dispatch: `submit` is the only way in, for HTTP and MQTT alike."""

from __future__ import annotations

from edged.core import Delta, Finish, Request


class Stream:
    """What submit returns: an async iterator of Deltas whose last event is exactly one Finish.

    aclose() cancels in queue, prefill and decode alike and may be called before the first
    iteration; use `async with contextlib.aclosing(stream)`. Never raises EngineFault: faults
    end the stream with Finish("failed", error_code=..., error_message=...).
    """

    request: Request

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta | Finish:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class Scheduler:
    def submit(self, request: Request) -> Stream:
        """Admit or refuse before the first byte: RequestError (queue_full, model_loading,
        shutting_down, ...) is raised here, at once, with retry_after_s."""
        raise NotImplementedError
