"""The NPU side of the worker: open a compiled model on the Ascend device, or on its twin."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from edged import wire
from edged.worker.contract import ModelSpec
from edged.worker.executor import empty_batch
from edged.worker.om.binding import Device, library
from edged.worker.om.codes import DeviceError
from edged.worker.om.executor import OmExecutor
from edged.worker.rules import log

OM_FILE = "model.om"
# pyACL tells the version of its interface only, which has hardly ever changed.
_VERSION_FILES = (
    "{ASCEND_TOOLKIT_HOME}/version.cfg",
    "{ASCEND_TOOLKIT_HOME}/runtime/version.info",
    "/usr/local/Ascend/driver/version.info",
)


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


def library_version() -> str:
    """pyACL's own version and what the files of toolkit and driver say of theirs."""
    board = "twin" if os.environ.get("EDGED_TWIN") else "CANN"
    words = [f"{board}, acl {library().get_version()[:3]}"]
    home = os.environ.get("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest")
    for name in _VERSION_FILES:
        with suppress(OSError):  # a part that is not installed has no version
            path = Path(name.format(ASCEND_TOOLKIT_HOME=home))
            words.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(words)
