"""The NPU side of the worker: open a compiled model on the Ascend device, or on its twin."""

from __future__ import annotations

import time
from contextlib import suppress

from edged import wire
from edged.worker.contract import ModelSpec
from edged.worker.executor import empty_batch
from edged.worker.om.binding import Device, library
from edged.worker.om.codes import DeviceError
from edged.worker.om.executor import OmExecutor
from edged.worker.rules import log

OM_FILE = "model.om"


def open_om(spec: ModelSpec, launch: wire.Launch) -> OmExecutor:
    """Raises ContractError, DeviceError kinds (OutOfDeviceMemory is a MemoryError), EngineFault."""
    device = Device(library())
    try:
        executor = OmExecutor(spec, launch.slots, device)
        started_s = time.monotonic()
        executor.run(empty_batch(0, 1, 1))
        log(f"first inference in {time.monotonic() - started_s:.3f} s")
    except BaseException:  # whatever it was: the device is given back, then it goes on
        with suppress(DeviceError):  # a broken device refuses this too; the cause counts
            device.close()
        raise
    executor.also_close(device.close)
    return executor
