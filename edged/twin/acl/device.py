"""`acl.rt.*`: devices and contexts."""

from __future__ import annotations

from edged.twin.acl import codes
from edged.twin.acl.call import CONTEXT, INITIALISED, Surface, action, producer
from edged.twin.acl.codes import Failure
from edged.twin.acl.process import Context
from edged.twin.acl.stream import Stream

_DEVICES = 1


class DeviceCalls(Surface):
    @action("i", INITIALISED)
    def set_device(self, device: int) -> None:
        process = self._process
        _check_device(device)
        process.check_device()
        with process.lock:
            if process.device_uses == 0:
                process.open_device()
            process.device_uses += 1
        process.use_default_context()

    @action("i", INITIALISED)
    def reset_device(self, device: int) -> None:
        process = self._process
        _check_device(device)
        with process.lock:
            if process.device_uses == 0:
                raise Failure(codes.INVALID_DEVICE_ID, f"device {device} is not set")
            process.device_uses -= 1
            if process.device_uses == 0:
                process.close_device()
                process.set_context(None)

    @producer("", 0, needs=CONTEXT)
    def get_device(self) -> int:
        return 0

    @producer("", 0, needs=INITIALISED)
    def get_run_mode(self) -> int:
        return self._process.run_mode

    @producer("", 0, needs=INITIALISED)
    def get_device_count(self) -> int:
        return _DEVICES

    @producer("i", 0, needs=INITIALISED)
    def query_device_status(self, device: int) -> int:
        """0 normal, 1 abnormal."""
        _check_device(device)
        return int(self._process.sticky is not None)

    @producer("i", {}, needs=CONTEXT)
    def get_device_utilization_rate(self, device: int) -> dict[str, int]:
        _check_device(device)
        cube = 100 if self._process.state.get("step_started_s") > 0 else 0
        return {
            "cube_utilization": cube,
            "vector_utilization": -1,
            "aicpu_utilization": 0,
            "memory_utilization": -1,
            "utilization_extend": 0,
        }

    @action("ii", INITIALISED)
    def device_task_abort(self, device: int, timeout_ms: int) -> None:
        raise Failure(codes.FEATURE_NOT_SUPPORT, "not on this chip")

    # --- contexts --------------------------------------------------------------------------------

    @producer("i", 0, needs=INITIALISED)
    def create_context(self, device: int) -> int:
        """Needs no set_device before; becomes the calling thread's current context."""
        process = self._process
        _check_device(device)
        process.check_device()
        with process.lock:
            if process.device_uses == 0:
                process.open_device()
                process.device_uses = 1
        context = Context(default=False, stream=Stream(process))
        context.stream.context = context
        process.set_context(context)
        return process.handles.add(context)

    @action("k", INITIALISED)
    def set_context(self, context: int) -> None:
        found = self._process.handles.get(context, Context, codes.CONTEXT_NULL)
        self._process.set_context(found)

    @producer("", 0, needs=CONTEXT)
    def get_context(self) -> int:
        return self._handle_of(self._process.context())

    @action("k", INITIALISED)
    def destroy_context(self, context: int) -> None:
        process = self._process
        found = process.handles.get(context, Context, codes.CONTEXT_NULL)
        if found.default:
            raise Failure(codes.RT_PARAM_INVALID, "the default context ends with reset_device")
        process.handles.remove(context, Context)
        found.stream.close()
        found.alive = False

    def _handle_of(self, context: Context) -> int:
        handle = self._process.handles.find(context)
        return handle if handle else self._process.handles.add(context)


class TimeoutCalls(Surface):
    """Time limits of kernels."""

    @action("i", CONTEXT)
    def set_op_execute_time_out(self, seconds: int) -> None:
        """0 = the chip's maximum."""
        if seconds < 0:
            raise Failure(codes.RT_PARAM_INVALID, f"{seconds} s is no time-out")
        process = self._process
        process.op_timeout_s = float(seconds) if seconds else process.longest_op_s()

    @action("i", CONTEXT)
    def set_op_wait_timeout(self, seconds: int) -> None:
        if self._process.run_mode == codes.EP:
            raise Failure(codes.FEATURE_NOT_SUPPORT, "not on a 310P")


def _check_device(device: int) -> None:
    if not 0 <= device < _DEVICES:
        raise Failure(codes.INVALID_DEVICE_ID, f"device {device}: there is only device 0")
