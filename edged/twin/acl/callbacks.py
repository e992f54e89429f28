"""`acl.rt.*`: host callbacks queued on a stream and run by a thread that subscribed to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from edged.twin.acl import codes
from edged.twin.acl.call import CONTEXT, Surface, action
from edged.twin.acl.codes import Failure
from edged.twin.acl.process import Process

_BLOCK = 1


class CallbackCalls(Surface):
    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._arrived = threading.Condition()
        self._waiting: dict[int, deque[Callable[[], None]]] = {}  # by thread

    @action("kk", CONTEXT)
    def subscribe_report(self, thread: int, stream: int) -> None:
        found = self._process.stream(stream)
        if found.subscriber:
            raise Failure(codes.STREAM_SUBSCRIBE, "the stream has a subscriber")
        found.subscriber = thread
        with self._arrived:
            self._waiting.setdefault(thread, deque())

    @action("kk", CONTEXT)
    def unsubscribe_report(self, thread: int, stream: int) -> None:
        found = self._process.stream(stream)
        if found.subscriber != thread:
            raise Failure(codes.THREAD_SUBSCRIBE, "the thread is no subscriber of this stream")
        found.subscriber = 0
        with self._arrived:
            self._waiting.pop(thread, None)

    @action("i", CONTEXT)
    def process_report(self, timeout_ms: int) -> None:
        """Runs one callback in the calling thread; -1 = waits for ever."""
        if timeout_ms == 0 or timeout_ms < -1:
            raise Failure(codes.INVALID_PARAM, f"time-out {timeout_ms} ms")
        queue = self._waiting.get(threading.get_ident())
        if queue is None:
            raise Failure(codes.THREAD_SUBSCRIBE, "this thread has not been subscribed yet")
        with self._arrived:
            timeout_s = None if timeout_ms < 0 else timeout_ms / 1000.0
            if not self._arrived.wait_for(lambda: queue, timeout_s):
                raise Failure(codes.REPORT_TIMEOUT, "no callback is due")
            callback = queue.popleft()
        callback()

    @action("OOik")
    def launch_callback(
        self, function: Callable[[Any], Any], arguments: list[Any], block: int, stream: int
    ) -> None:
        """The function gets one argument, the list. block 1: later tasks wait for it."""
        found = self._process.stream(stream)
        if not found.subscriber:
            raise Failure(codes.STREAM_NO_CALLBACK, "nobody subscribed to the stream")
        done = threading.Event()

        def run() -> None:
            try:
                function(arguments)
            finally:
                done.set()

        def arrive() -> None:
            with self._arrived:
                self._waiting[found.subscriber].append(run)
                self._arrived.notify_all()
            if block == _BLOCK:
                done.wait()

        found.submit(arrive)
