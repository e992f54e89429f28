"""What one process sees of the device: initialisation, contexts, memory, handles, its last error.

A fault of the device sticks to the process until it ends, as on a board. One object per process;
tests make several to play several processes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged.errors import EdgedError
from edged.twin.acl import codes
from edged.twin.acl.codes import Failure
from edged.twin.acl.handles import Handles
from edged.twin.acl.memory import DeviceMemory
from edged.twin.acl.pages import PATTERN
from edged.twin.acl.stream import Stream
from edged.twin.faults import Event, Fault, Faults
from edged.twin.state import TwinState

# What must be there before a call does anything.
NOTHING, INITIALISED, CONTEXT, DEVICE = range(4)
# Failures of a task after which nothing works in this process any more.
_LASTING = (
    codes.LOST_HEARTBEAT,
    codes.AICORE_TIMEOUT,
    codes.AICORE_EXCEPTION,
    codes.DEVICE_MEM_ERROR,
)
# Seconds a kernel may take by default: 310B on its own board, 310P cards.
_PIN_ALIGNMENT_BYTES = 4096
_OP_TIMEOUT_S = {codes.RC: 1091.0, codes.EP: 547.0}


@dataclass(eq=False)
class Context:
    """default: made by set_device and shared by threads; stream: of the calls that name none."""

    default: bool
    stream: Stream
    alive: bool = True


class Process:
    """folder: of the twin's state; read from EDGED_TWIN at acl.init when not given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.lock = threading.RLock()
        self.handles = Handles()
        self.op_timeout_s = 0.0
        self.device_uses = 0
        self.initialised = False
        self.finalised = False
        self.sticky: Failure | None = None
        self._folder = folder
        self._local = threading.local()
        self._default: Context | None = None
        self._executing = 0
        self._pinned: dict[int, Any] = {}  # host memory of a card, by address

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """acl.init: find the board. Raises Failure when there is none."""
        folder = self._folder or Path(os.environ.get("EDGED_TWIN", ""))
        try:
            self.state = TwinState(folder)
        except (EdgedError, OSError) as error:
            raise Failure(codes.INVALID_PARAM, str(error)) from None
        self.faults = Faults(self.state)
        self.run_mode = int(self.state.get("run_mode"))
        self.op_timeout_s = self.longest_op_s()
        self.initialised = True

    def longest_op_s(self) -> float:
        return _OP_TIMEOUT_S[self.run_mode]

    def open_device(self) -> None:
        """The first set_device: memory, and the counters are this process's."""
        state = self.state
        total = int(state.board.memory.total_bytes)
        self.memory = DeviceMemory(total, visible=self.run_mode == codes.RC)
        state.set("pid", os.getpid())
        state.set("step_started_s", 0.0)
        state.set("memory_total_bytes", self.memory.total_bytes)
        state.set("memory_peak_bytes", 0.0)
        self.count_memory()
        self._default = Context(default=True, stream=Stream(self))
        self._default.stream.context = self._default

    def close_device(self) -> None:
        """The last reset_device: wait for the default stream, give the memory back."""
        if self._default is not None:
            self._default.stream.wait(None)
            self._default.stream.close()
            self._default.alive = False
        self._default = None
        if self._executing == 0:  # else the process is about to end, and takes its memory along
            self.memory.close()
        self.state.set("memory_used_bytes", 0.0)
        self.state.set("pid", 0.0)

    # --- what calls need -------------------------------------------------------------------------

    def require(self, level: int, without_init: int) -> None:
        """Raises Failure where the library would refuse the call."""
        if not self.initialised:
            raise Failure(without_init, "acl.init has not been called")
        if level >= CONTEXT:
            self.context()
        if level >= DEVICE:
            self.check_device()

    def check_device(self) -> None:
        """Raises the failure that sticks, and the ordered loss of the device."""
        if self.sticky is not None:
            raise self.sticky
        if self.due("call"):
            self.break_down(Failure(codes.LOST_HEARTBEAT, "the device does not answer any more"))

    def context(self) -> Context:
        """The calling thread's; a thread that made none shares the default one once it has
        called set_device. Raises Failure."""
        current = getattr(self._local, "context", None)
        if current is None or not current.alive:
            raise Failure(codes.CONTEXT_NULL, "no context is set in this thread")
        return current  # type: ignore[no-any-return]

    def set_context(self, context: Context | None) -> None:
        self._local.context = context

    def use_default_context(self) -> None:
        self.set_context(self._default)

    def stream(self, handle: int) -> Stream:
        """0 is the default stream of the current context. Raises Failure."""
        context = self.context()
        if handle == 0:
            return context.stream
        stream = self.handles.get(handle, Stream, codes.INVALID_HANDLE)
        if stream.context is not context:
            raise Failure(codes.STREAM_CONTEXT, "the stream belongs to another context")
        return stream

    # --- faults ----------------------------------------------------------------------------------

    def due(self, event: Event) -> list[Fault]:
        return self.faults.due(event)

    def break_down(self, failure: Failure) -> None:
        """Raise, and stick where the device is done for."""
        if failure.code in _LASTING:
            self.sticky = failure
        raise failure

    def task(self, body: Callable[[], None]) -> Callable[[], None]:
        """What a stream runs: a bad address there is an exception of the core, and lasts."""

        def run() -> None:
            try:
                body()
            except Failure as failure:
                if failure.code == codes.RT_PARAM_INVALID:
                    failure = Failure(codes.AICORE_EXCEPTION, str(failure))
                self.break_down(failure)

        return run

    def note(self, call: str, failure: Failure) -> None:
        self._local.message = f"EE{failure.code % 10000:04d}: {call}: {failure}"

    def take_message(self) -> str | None:
        """The last failure's text in this thread; reading clears it."""
        message: str | None = getattr(self._local, "message", None)
        self._local.message = None
        return message

    # --- memory ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, padded_bytes: int, policy: int, own: bool = False) -> int:
        """Device memory, counted. own: the library's, closed to the caller. Raises Failure."""
        with self.lock:
            if any(f.kind == "oom" for f in self.due("allocation")):
                raise Failure(codes.MEMORY_ALLOCATION, "ordered: no memory")
            address = self.memory.take(size_bytes, padded_bytes, policy, time.monotonic(), not own)
            self.state.add("allocations_total", 1)
            self.count_memory()
        return address

    def release(self, address: int) -> None:
        with self.lock:
            self.memory.give(address, executing=self._executing > 0)
            self.state.add("frees_total", 1)
            self.count_memory()

    @contextmanager
    def executing(self) -> Iterator[None]:
        """The device is at work: what is freed meanwhile is closed afterwards."""
        with self.lock:
            self._executing += 1
        try:
            yield
        finally:
            with self.lock:
                self._executing -= 1
                if self._executing == 0:
                    self.memory.settle()

    def pin(self, size_bytes: int) -> int:
        """Host memory of malloc_host on a card; as little clean as the device's."""
        memory = (ctypes.c_uint8 * (size_bytes + _PIN_ALIGNMENT_BYTES))()
        start = ctypes.addressof(memory)
        address = -(-start // _PIN_ALIGNMENT_BYTES) * _PIN_ALIGNMENT_BYTES
        ctypes.memset(address, PATTERN, size_bytes)
        self._pinned[address] = memory
        return address

    def unpin(self, address: int) -> None:
        if self._pinned.pop(address, None) is None:
            raise Failure(codes.RT_PARAM_INVALID, f"{address:#x} is not pinned (any more)")

    def count_memory(self) -> None:
        used = self.memory.total_bytes - self.memory.free_bytes
        self.state.set("memory_used_bytes", used)
        if used > self.state.get("memory_peak_bytes"):
            self.state.set("memory_peak_bytes", used)

    def reclaim(self) -> bool:
        """The ordered removal of unused buffers, if any; True while it is in force."""
        fault = self.faults.standing("reclaim")
        if fault is not None:
            with self.lock:
                self.memory.reclaim(time.monotonic() - fault.seconds)
                self.count_memory()
        return fault is not None

    def locate(self, address: int, count: int) -> int:
        """Where `count` bytes at a device or host address lie. Raises Failure."""
        if address == 0:
            raise Failure(codes.RT_PARAM_INVALID, "null pointer")
        if not self.memory.owns(address):
            return address  # the caller's own memory: a wild pointer crashes, as it would there
        self.reclaim()
        with self.lock:
            return self.memory.locate(address, count, time.monotonic())

    def locate_on_device(self, address: int, count: int) -> int:
        """For what the device itself reads or writes. Raises Failure."""
        if not self.memory.owns(address):
            raise Failure(codes.RT_PARAM_INVALID, f"{address:#x} is not device memory")
        return self.locate(address, count)
