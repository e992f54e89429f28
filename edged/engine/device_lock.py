"""DeviceLock: one worker per device, also across daemons and their sudden ends.

The worker inherits a locked file, so the lock lives exactly as long as somebody can still hold
the device. A holder whose daemon is gone is an orphan: it is waited for, then killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from pathlib import Path

import msgspec
import structlog

from edged.errors import EngineFault

log = structlog.get_logger("edged.engine")

_ORPHAN_ENDS_S = 2.0  # by itself: the kernel tells it of its parent's end
_KILLED_ENDS_S = 10.0  # a call into a driver is waited for by the kernel, too
_LOOK_EVERY_S = 0.05


class WorkerStuck(EngineFault):
    """A worker that even SIGKILL does not end holds the device."""


class DeviceHeld(EngineFault):
    """Somebody who is not ours to end holds the device: nobody may be rebooted for that."""


class _Process(msgspec.Struct, frozen=True):
    """A process id alone may mean another process by now. started: ticks since boot."""

    pid: int
    started: int

    def lives(self) -> bool:
        return started(self.pid) == self.started


class _Holder(msgspec.Struct, frozen=True):
    worker: _Process
    daemon: _Process


class DeviceLock:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def claim(self) -> int | None:
        """The locked file, to be inherited by the worker and closed here once it has begun; None
        where no file can be made: then there is no lock, which is better than no engine.

        Raises DeviceHeld when another daemon's worker or somebody unknown holds it, WorkerStuck
        when an orphan cannot be ended.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("no_device_lock", path=str(self._path), why=error.strerror)
            return None
        try:
            if not _lock(file):
                await self._wait_for_holder(file)
        except OSError as error:
            os.close(file)
            log.warning("no_device_lock", path=str(self._path), why=error.strerror)
            return None
        except BaseException:  # cancelled while waiting, too: the file must not stay open
            os.close(file)
            raise
        return file

    def record(self, file: int, worker_pid: int) -> None:
        """Who holds it from now on, for a daemon that comes after us."""
        holder = _Holder(
            _Process(worker_pid, started(worker_pid) or 0),
            _Process(os.getpid(), started(os.getpid()) or 0),
        )
        with contextlib.suppress(OSError):  # a full disk: an orphan could not be told, no more
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(holder), 0)

    async def _wait_for_holder(self, file: int) -> None:
        holder = _read(file)
        if holder is not None and holder.daemon.lives() and holder.daemon.pid != os.getpid():
            raise DeviceHeld(
                f"the device is held by worker {holder.worker.pid} of the edged process "
                f"{holder.daemon.pid}; stop that one"
            )
        if await _locked_within(file, _ORPHAN_ENDS_S):
            return
        if holder is None or not holder.worker.lives():
            raise DeviceHeld(f"somebody unknown holds {self._path}; see `fuser {self._path}`")
        try:
            os.kill(holder.worker.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.info("orphan_worker_ended", pid=holder.worker.pid, lock=str(self._path))
        except PermissionError:
            raise DeviceHeld(
                f"worker {holder.worker.pid} of another user's edged holds the device; end it"
            ) from None
        else:
            log.warning("orphan_worker_killed", pid=holder.worker.pid, lock=str(self._path))
        if not await _locked_within(file, _KILLED_ENDS_S):
            raise WorkerStuck(
                f"worker {holder.worker.pid} of an earlier run holds the device and cannot be "
                "killed; only a reboot ends it"
            )


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _locked_within(file: int, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while not _lock(file):
        if loop.time() >= end_s:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


def _read(file: int) -> _Holder | None:
    try:
        return msgspec.json.decode(os.pread(file, 4096, 0), type=_Holder)
    except (OSError, msgspec.DecodeError):
        return None


def started(pid: int) -> int | None:
    """When a process began, in ticks since boot; None when there is none, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])
