"""VirtualLoop: an event loop whose time jumps to the next timer instead of waiting.

For the lab and for tests of the core: hours pass in milliseconds, deterministically. It refuses
sockets, executors and subprocesses, since nothing outside it keeps its time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


class StuckError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks: reports how long the loop wanted to sleep."""

    slept_s: float = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("no task is ready and no timer is set")
        self.slept_s += max(0.0, timeout)
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.slept_s

    def run_in_executor(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("a virtual loop has no executors")

    async def sock_connect(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets")

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets")

    async def create_server(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets")

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no subprocesses")


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run on a VirtualLoop: leftover tasks are cancelled, generators closed."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
