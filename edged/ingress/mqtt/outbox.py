"""Outbox: messages on their way to the broker, in order, across connections.

Bounded. put() is plain def and never waits; a few publishes are under way at a time. When a
connection falls, what was not acknowledged goes first on the next one; chunks do not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from edged.ingress.mqtt.messages import Outgoing

WINDOW = 8  # publishes under way at a time; the library complains above 10
MAX_MESSAGES = 1024
MAX_BYTES = 8 << 20
MAX_WAITING_CHUNKS = 64
MAX_ATTEMPTS = 5  # connections that fell while this message, alone, was under way

Send = Callable[[Outgoing], Awaitable[None]]


@dataclass
class _Entry:
    message: Outgoing
    attempts: int = 0


class Outbox:
    """on_drop(reason): a message was given up; reasons are a small closed set."""

    def __init__(
        self,
        on_drop: Callable[[str], None],
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._on_drop = on_drop
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[_Entry] = deque()
        self._waiting_bytes = 0
        self._flying: dict[asyncio.Task[None], _Entry] = {}
        self._send: Send | None = None
        self._broken: asyncio.Future[None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flying)

    def put(self, message: Outgoing) -> None:
        """Queue it. Without a connection chunks are dropped; a full box drops its oldest."""
        if message.transient and self._send is None:
            self._on_drop("chunk_offline")
            return
        if message.transient and len(self._waiting) >= MAX_WAITING_CHUNKS:
            self._on_drop("chunk_slow")
            return
        self._push(_Entry(message))
        while len(self._waiting) > self._max_messages or self._waiting_bytes > self._max_bytes:
            self._pop()
            self._on_drop("outbox_full")
        self._pump()

    def attach(self, send: Send, first: Iterable[Outgoing] = ()) -> asyncio.Future[None]:
        """Send through this connection, `first` before all else.

        The future fails when a send does; then call detach().
        """
        self._send = send
        self._broken = asyncio.get_running_loop().create_future()
        for message in reversed(list(first)):
            self._push(_Entry(message), front=True)
        self._pump()
        return self._broken

    def detach(self) -> None:
        """The connection is gone: keep what another one may deliver, in order."""
        self._send = None
        if self._broken is not None and not self._broken.cancel() and not self._broken.cancelled():
            self._broken.exception()  # seen: asyncio would report it as forgotten
        flying = list(self._flying.items())
        self._flying.clear()
        waiting = [entry for entry in self._waiting if not entry.message.transient]
        self._waiting.clear()
        self._waiting_bytes = 0
        for task, entry in flying:
            task.cancel()
            entry.attempts += 1
            if entry.attempts >= MAX_ATTEMPTS:
                self._on_drop("undeliverable")
            elif not entry.message.transient:
                self._push(entry)
        for entry in waiting:
            self._push(entry)
        self._settle()

    async def drained(self, within_s: float) -> bool:
        """Wait until everything is acknowledged, at most within_s."""
        try:
            await asyncio.wait_for(self._empty.wait(), within_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _push(self, entry: _Entry, front: bool = False) -> None:
        (self._waiting.appendleft if front else self._waiting.append)(entry)
        self._waiting_bytes += entry.message.size_bytes
        self._empty.clear()

    def _pop(self) -> _Entry:
        entry = self._waiting.popleft()
        self._waiting_bytes -= entry.message.size_bytes
        return entry

    def _pump(self) -> None:
        """Start sends while the window has room; a message that failed before flies alone."""
        while self._send is not None and self._waiting:
            suspect = self._waiting[0].attempts or any(e.attempts for e in self._flying.values())
            if len(self._flying) >= (1 if suspect else WINDOW):
                return
            entry = self._pop()
            task = asyncio.ensure_future(self._send(entry.message))
            self._flying[task] = entry
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if task not in self._flying:
            return  # of a connection that is gone
        if fault is not None or task.cancelled():
            # It stays in _flying: detach() decides what becomes of it.
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(fault or ConnectionError("a send was cancelled"))
            return
        del self._flying[task]
        self._settle()
        self._pump()

    def _settle(self) -> None:
        if not self._waiting and not self._flying:
            self._empty.set()
