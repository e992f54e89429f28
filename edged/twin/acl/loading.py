"""From a path or a pointer to a loaded model, with its device memory taken and counted."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edged.twin import om
from edged.twin.acl import codes
from edged.twin.acl.codes import Failure
from edged.twin.acl.execution import rest
from edged.twin.acl.model import Model
from edged.twin.acl.process import Process

_HEAD_BYTES = 1 << 25

# Memory the caller gives: (pointer, bytes); pointer 0 = the library takes its own.
Given = tuple[int, int]
NONE: Given = (0, 0)


def query_file(path: str) -> om.OmFile:
    """Raises Failure."""
    where = Path(path)
    try:
        if where.stat().st_size == 0:
            raise Failure(codes.GE_MODEL_PATH_INVALID, f"{path} is empty")
        return om.read_file(where)
    except OSError as error:
        raise Failure(codes.GE_MODEL_PATH_INVALID, f"{path}: {error.strerror}") from None
    except om.OmError as error:
        raise Failure(codes.GE_MODEL_DATA_SIZE_INVALID, f"{path}: {error}") from None


def query_memory(process: Process, address: int, size_bytes: int) -> om.OmFile:
    """Raises Failure."""
    place = model_place(process, address, size_bytes)
    head = ctypes.string_at(place, min(size_bytes, _HEAD_BYTES))
    try:
        return om.read(head, size_bytes)
    except om.OmError as error:
        raise Failure(codes.GE_MODEL_DATA_SIZE_INVALID, str(error)) from None


def load(
    process: Process, path: Path, found: om.OmFile, work: Given = NONE, weights: Given = NONE
) -> Model:
    """Take memory, build the session. Raises Failure; then nothing stays taken."""
    header = found.header
    if header.soc != process.state.board.soc:
        raise Failure(
            codes.SOC_VERSION, f"built for {header.soc}, this is {process.state.board.soc}"
        )
    for fault in process.due("load"):
        rest(fault.seconds, keeps_gil=bool(process.state.get("hold_gil")))
    owned: list[int] = []
    try:
        for needed, given in ((header.work_bytes, work), (header.weight_bytes, weights)):
            _take(process, needed, given, owned)
        threads = int(process.state.get("threads")) or len(os.sched_getaffinity(0))
        model = Model(path, found, threads)
    except Failure:
        for address in owned:
            process.release(address)
        raise
    model.owned = owned
    process.state.add("loads_total", 1)
    return model


def _take(process: Process, needed: int, given: Given, owned: list[int]) -> None:
    address, size_bytes = given
    if address:
        if size_bytes < needed:
            raise Failure(codes.GE_PARAM_INVALID, f"{size_bytes} bytes given, {needed} needed")
        process.locate(address, needed)
        return
    try:
        owned.append(process.allocate(needed, needed, codes.HUGE_FIRST, own=True))
    except Failure as failure:
        raise Failure(codes.GE_MEMORY_ALLOCATION, str(failure)) from None


def model_place(process: Process, address: int, size_bytes: int) -> int:
    """Where a container in memory may be read. On a card it must be host memory."""
    if address == 0 or size_bytes == 0:
        raise Failure(codes.INVALID_PARAM, "no model data")
    if process.memory.owns(address) and process.run_mode == codes.EP:
        raise Failure(codes.GE_MODEL_ADDR_INVALID, "on a card the model must be in host memory")
    return process.locate(address, size_bytes)


@contextmanager
def as_file(place: int, size_bytes: int) -> Iterator[Path]:
    """A path to load a container in memory from: the file that is mapped there, or a copy of it
    that is gone afterwards. onnxruntime reads what it needs while it loads."""
    mapped = _mapped_file(place)
    if mapped is not None:
        yield mapped
        return
    handle, name = tempfile.mkstemp(suffix=om.SUFFIX)
    copy = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write((ctypes.c_uint8 * size_bytes).from_address(place))
        yield copy
    finally:
        with suppress(FileNotFoundError):
            copy.unlink()


def _mapped_file(place: int) -> Path | None:
    """The file whose first byte is mapped at this very address, if there is one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        if int(span.split("-")[0], 16) == place and int(offset, 16) == 0 and inode != "0":
            path = Path(name[0]) if name else None
            return path if path is not None and path.is_file() else None
    return None
