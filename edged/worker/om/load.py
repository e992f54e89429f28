"""From an .om file to a loaded model: mapped instead of read, admitted before it is loaded.

Loading from a path would hold the whole file in the heap beside the weights; a mapping only
borrows page cache. Takes no memory itself but the model's weights.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edged.worker.contract import ContractError
from edged.worker.om import codes
from edged.worker.om.binding import Device, Model
from edged.worker.om.codes import CallerError, OutOfDeviceMemory
from edged.worker.rules import log

SPARE_BYTES = 512 << 20  # left to the rest of the machine
_STAGING_BYTES = 8 << 20
_TRANSIENT_SHARE = 0.2  # of the weights, while they are loaded
_MEMINFO = Path("/proc/meminfo")

Given = tuple[int, int]  # (address, bytes) of memory for the library to use


@dataclass(frozen=True)
class OmFile:
    """A mapped container; valid inside `mapped` only."""

    path: Path
    address: int
    size_bytes: int
    work_bytes: int
    weight_bytes: int


@contextmanager
def mapped(device: Device, path: Path) -> Iterator[OmFile]:
    """Map a file and ask what it needs. Raises ContractError when it is no usable model."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ContractError(
            f"cannot read {path}: {error.strerror}; run `edged export --target om`"
        ) from None
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise ContractError(f"{path} is empty; copy or export it again")
        with mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) as mapping:
            mapping.madvise(mmap.MADV_SEQUENTIAL)
            data = np.frombuffer(mapping, np.uint8)
            try:
                yield _described(device, path, int(data.ctypes.data), size_bytes)
            finally:
                del data  # the mapping cannot be closed while somebody looks at it
        # Read once, never again: leave the page cache to others.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _described(device: Device, path: Path, address: int, size_bytes: int) -> OmFile:
    device.attach()
    found = device.acl.mdl.query_size_from_mem(address, size_bytes)
    try:
        work, weights = device.value(found, "mdl.query_size_from_mem", size_bytes)
    except CallerError as error:
        raise ContractError(f"cannot use {path}: {error}") from None
    return OmFile(path, address, size_bytes, work, weights)


def admit(device: Device, weight_bytes: int, arena_bytes: int) -> None:
    """Refuse a load the machine cannot bear. Raises OutOfDeviceMemory with the sum."""
    transient = int(_TRANSIENT_SHARE * weight_bytes)
    needed = weight_bytes + arena_bytes + transient + SPARE_BYTES
    free, _ = device.memory()
    if device.shared:  # the same memory as Linux's, which may count it differently
        free = min(free, available_bytes(_MEMINFO.read_text(encoding="ascii")))
    if needed > free:
        raise OutOfDeviceMemory(
            "admission",
            codes.MEMORY_ALLOCATION,
            f"weights {_mib(weight_bytes)} + arena {_mib(arena_bytes)} + loading "
            f"{_mib(transient)} + spare {_mib(SPARE_BYTES)} = {_mib(needed)} MiB, {_mib(free)} MiB "
            "are available; use fewer slots, a shorter context or a smaller model",
        )


def available_bytes(meminfo: str) -> int:
    """MemAvailable of /proc/meminfo."""
    line = next(x for x in meminfo.splitlines() if x.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def load(device: Device, om: OmFile, work: Given) -> Model:
    """Load with this work memory; the weights are the library's own.

    Raises DeviceError kinds.
    """
    try:
        model_id = _load(device, om.address, om.size_bytes, work)
    except CallerError as error:
        # The documentation of shared-memory boards asks for device memory here; boards have
        # taken a mapping all the same.
        refusals = (codes.GE_MODEL_ADDR_INVALID, codes.INVALID_PARAM)
        if not device.shared or error.ret not in refusals:
            raise
        log(f"{error}; loading once more through device memory")
        model_id = _load_staged(device, om, work)
    return Model(device, model_id)


def _load_staged(device: Device, om: OmFile, work: Given) -> int:
    """Twice the model's memory for a moment, as the price of a library that wants it so."""
    staged = device.malloc(om.size_bytes)
    try:
        for at in range(0, om.size_bytes, _STAGING_BYTES):
            size_bytes = min(_STAGING_BYTES, om.size_bytes - at)
            device.copy(staged + at, om.address + at, size_bytes, codes.HOST_TO_DEVICE)
        return _load(device, staged, om.size_bytes, work)
    finally:
        device.free(staged)


def _load(device: Device, address: int, size_bytes: int, work: Given) -> int:
    device.attach()
    made = device.acl.mdl.load_from_mem_with_mem(address, size_bytes, *work, 0, 0)
    return int(device.value(made, "mdl.load_from_mem_with_mem", size_bytes))


def _mib(size_bytes: int) -> int:
    return size_bytes >> 20
