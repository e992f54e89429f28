"""`acl.rt.*`: streams and events."""

from __future__ import annotations

from edged.twin.acl import codes
from edged.twin.acl.call import CONTEXT, Surface, action, producer
from edged.twin.acl.codes import Failure
from edged.twin.acl.process import Process
from edged.twin.acl.stream import Event, Stream

_STREAMS = {codes.RC: 512, codes.EP: 1024}  # 310B, 310P
_EVENTS = {codes.RC: 65536, codes.EP: 1023}


class StreamCalls(Surface):
    @producer("", 0)
    def create_stream(self) -> int:
        process = self._process
        if process.handles.count(Stream) >= _STREAMS[process.run_mode]:
            raise Failure(codes.NO_STREAM_RESOURCE, "too many streams")
        stream = Stream(process)
        stream.context = process.context()
        return process.handles.add(stream)

    @producer("ii", 0)
    def create_stream_with_config(self, priority: int, flag: int) -> int:
        made, code = self.create_stream()
        if code:
            raise Failure(code, "no stream")
        return int(made)

    @action("k", CONTEXT)
    def destroy_stream(self, stream: int) -> None:
        """Waits for what is queued; a hung task makes it wait too."""
        found = self._process.handles.get(stream, Stream, codes.INVALID_HANDLE)
        found.close()
        if self._process.sticky is None:
            found.wait(None)
        self._process.handles.remove(stream, Stream)

    @action("k", CONTEXT)
    def destroy_stream_force(self, stream: int) -> None:
        self._process.handles.remove(stream, Stream, codes.INVALID_HANDLE).close()

    @action("k")
    def synchronize_stream(self, stream: int) -> None:
        _wait(self._process, self._process.stream(stream), None)

    @action("ki")
    def synchronize_stream_with_timeout(self, stream: int, timeout_ms: int) -> None:
        """-1 = for ever."""
        _wait(self._process, self._process.stream(stream), _seconds(timeout_ms))

    @action("")
    def synchronize_device(self) -> None:
        _wait(self._process, self._process.context().stream, None)
        for stream in self._process.handles.all(Stream):
            _wait(self._process, stream, None)

    @producer("k", 0xFFFF)
    def stream_query(self, stream: int) -> int:
        """0 complete, 1 not ready."""
        return int(not self._process.stream(stream).idle())

    @action("ki", CONTEXT)
    def set_stream_failure_mode(self, stream: int, mode: int) -> None:
        self._process.stream(stream)
        if mode not in (0, 1):
            raise Failure(codes.RT_PARAM_INVALID, f"failure mode {mode} is unknown")

    @producer("", 0, needs=CONTEXT)
    def get_stream_available_num(self) -> int:
        process = self._process
        return _STREAMS[process.run_mode] - process.handles.count(Stream)

    @action("k", CONTEXT)
    def stream_abort(self, stream: int) -> None:
        raise Failure(codes.FEATURE_NOT_SUPPORT, "not on this chip")

    @action("kk")
    def stream_wait_event(self, stream: int, event: int) -> None:
        mark = self._event(event)
        self._process.stream(stream).submit(mark.wait_for_ever)

    # --- events ----------------------------------------------------------------------------------

    @producer("", 0)
    def create_event(self) -> int:
        process = self._process
        if process.handles.count(Event) >= _EVENTS[process.run_mode]:
            raise Failure(codes.NO_EVENT_RESOURCE, "too many events")
        return process.handles.add(Event())

    @producer("i", 0)
    def create_event_with_flag(self, flag: int) -> int:
        made, code = self.create_event()
        if code:
            raise Failure(code, "no event")
        return int(made)

    @action("k", CONTEXT)
    def destroy_event(self, event: int) -> None:
        self._process.handles.remove(event, Event, codes.INVALID_HANDLE)

    @action("kk")
    def record_event(self, event: int, stream: int) -> None:
        self._event(event).record(self._process.stream(stream))

    @action("kk")
    def reset_event(self, event: int, stream: int) -> None:
        mark = self._event(event)
        self._process.stream(stream).submit(mark.reset, always=True)

    @producer("k", 1)
    def query_event(self, event: int) -> int:
        """0 complete, 1 not ready."""
        return int(not self._event(event).complete)

    @producer("k", 0)
    def query_event_status(self, event: int) -> int:
        """The other way round: 1 complete, 0 not ready."""
        return int(self._event(event).complete)

    @producer("k", 1)
    def query_event_wait_status(self, event: int) -> int:
        return int(not self._event(event).complete)

    @action("k")
    def synchronize_event(self, event: int) -> None:
        self._event(event).wait(None)
        self._process.check_device()

    @action("ki")
    def synchronize_event_with_timeout(self, event: int, timeout_ms: int) -> None:
        if not self._event(event).wait(_seconds(timeout_ms)):
            raise Failure(codes.EVENT_SYNC_TIMEOUT, f"not reached within {timeout_ms} ms")
        self._process.check_device()

    @producer("kk", 0.0)
    def event_elapsed_time(self, start: int, end: int) -> float:
        return self._event(start).elapsed_ms(self._event(end))

    @producer("k", 0)
    def event_get_timestamp(self, event: int) -> int:
        """Microseconds of the device's clock."""
        at_s = self._event(event).at_s
        if at_s is None:
            raise Failure(codes.EVENT_TIMESTAMP, "the event has not been recorded yet")
        return int(at_s * 1e6)

    def _event(self, handle: int) -> Event:
        return self._process.handles.get(handle, Event, codes.INVALID_HANDLE)


def _wait(process: Process, stream: Stream, timeout_s: float | None) -> None:
    try:
        done = stream.wait(timeout_s)
    except Failure as failure:
        process.break_down(failure)
    if not done:
        raise Failure(codes.STREAM_SYNC_TIMEOUT, f"the stream is not idle after {timeout_s:.3f} s")


def _seconds(timeout_ms: int) -> float | None:
    if timeout_ms == -1:
        return None
    if timeout_ms <= 0:
        raise Failure(codes.RT_PARAM_INVALID, f"time-out {timeout_ms} ms: give -1 or more than 0")
    return timeout_ms / 1000.0
