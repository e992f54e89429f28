"""Streams and events: tasks run in order on a thread of their own, callers wait without the GIL."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from edged.twin.acl import codes
from edged.twin.acl.codes import Failure

if TYPE_CHECKING:
    from edged.twin.acl.process import Context, Process

Task = Callable[[], None]


class Stream:
    """A queue of tasks. A failure stays until somebody synchronises and hears of it."""

    def __init__(self, process: Process) -> None:
        self.context: Context | None = None
        self.subscriber = 0  # thread id that processes this stream's callbacks
        self._process = process
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Task, bool]] = deque()
        self._running = False
        self._failure: Failure | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, task: Task, always: bool = False) -> None:
        """always: runs even on a broken device, so that nobody waits for it in vain."""
        with self._changed:
            self._tasks.append((task, always))
            if self._thread is None:
                # A daemon: a hung kernel must not keep the process from exiting.
                self._thread = threading.Thread(target=self._work, daemon=True, name="stream")
                self._thread.start()
            self._changed.notify_all()

    def idle(self) -> bool:
        with self._changed:
            return not self._tasks and not self._running

    def wait(self, timeout_s: float | None) -> bool:
        """False when the time is over first. Raises the failure of a task, once."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._tasks and not self._running, timeout_s)
            if done and self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return done

    def close(self) -> None:
        """Tasks already queued still run; the thread ends after them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task, always = self._tasks.popleft()
                self._running = True
            failure = self._run(task, always)
            with self._changed:
                self._running = False
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _run(self, task: Task, always: bool) -> Failure | None:
        try:
            if self._process.sticky is not None and not always:
                raise self._process.sticky
            task()
        except Failure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - a dead thread would hang its waiters
            return Failure(codes.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        return None


class Event:
    """A mark in a stream. A fresh event counts as complete, as in the library."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending = 0
        self.at_s: float | None = None

    def record(self, stream: Stream) -> None:
        with self._changed:
            self._pending += 1
        stream.submit(self._reached, always=True)

    def reset(self) -> None:
        self.at_s = None

    @property
    def complete(self) -> bool:
        return self._pending == 0

    def wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def wait_for_ever(self) -> None:
        """As a task of another stream."""
        self.wait(None)

    def elapsed_ms(self, end: Event) -> float:
        if self.at_s is None or end.at_s is None:
            raise Failure(codes.EVENT_TIMESTAMP, "an event has not been recorded yet")
        return (end.at_s - self.at_s) * 1000.0

    def _reached(self) -> None:
        with self._changed:
            self.at_s = time.monotonic()
            self._pending -= 1
            self._changed.notify_all()
