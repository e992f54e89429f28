"""One worker per device, whatever became of the daemon that started it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fakes import request
from fakes_ladder import QUICK, SCRIPT, until

from edged import wire
from edged.engine import device_lock
from edged.engine.device_lock import DeviceHeld, DeviceLock
from edged.engine.life import Means
from edged.engine.overseer import Overseer, Watch
from edged.engine.rungs import Rung
from edged.engine.worker_engine import WorkerEngine
from edged.errors import EngineFault
from edged.memory import Memory

# A daemon that starts a worker on the device, tells its pid, and then ends or stays.
DAEMON = """
import asyncio, subprocess, sys
from pathlib import Path
from edged.engine.device_lock import DeviceLock

async def main():
    lock = DeviceLock(Path(sys.argv[1]))
    file = await lock.claim()
    worker = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=(file,), start_new_session=True,
                              stdout=subprocess.DEVNULL)
    lock.record(file, worker.pid)
    print(worker.pid, flush=True)
    if sys.argv[3] == "stays":
        sys.stdin.read()

asyncio.run(main())
"""


@contextmanager
def held(path: Path, worker_s: float, daemon: str) -> Iterator[psutil.Process]:
    """The worker that holds the lock; its daemon "ends" or "stays"."""
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(path), str(worker_s), daemon],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    if daemon == "ends":
        process.wait()
    try:
        yield worker
    finally:
        process.communicate("")
        if worker.is_running():
            worker.kill()


async def claimed(path: Path) -> int:
    file = await DeviceLock(path).claim()
    assert file is not None
    return file


async def test_a_free_device_is_claimed_at_once(tmp_path: Path) -> None:
    """Also when its last holder left a record behind."""
    with held(tmp_path / "npu.lock", 0.01, "ends") as worker:
        await until(lambda: not worker.is_running())
        os.close(await asyncio.wait_for(claimed(tmp_path / "npu.lock"), 1))


async def test_an_orphan_is_killed_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker whose daemon is gone and that does not end by itself is ended, and the log says
    which one it was."""
    with held(tmp_path / "npu.lock", 60, "ends") as worker:
        os.close(await claimed(tmp_path / "npu.lock"))
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        out = capsys.readouterr().out
        assert "orphan_worker_killed" in out
        assert str(worker.pid) in out


async def test_an_orphan_that_ends_by_itself_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel needs a moment to end the worker of a killed daemon; nobody is killed for it."""
    with held(tmp_path / "npu.lock", 1, "ends"):
        os.close(await claimed(tmp_path / "npu.lock"))
        assert "killed" not in capsys.readouterr().out


async def test_the_worker_of_a_living_daemon_is_left_alone(tmp_path: Path) -> None:
    """Two daemons on one device: the second says who has it, and touches nothing."""
    with held(tmp_path / "npu.lock", 60, "stays") as worker:
        with pytest.raises(EngineFault, match=f"held by worker {worker.pid} of the edged process"):
            await DeviceLock(tmp_path / "npu.lock").claim()
        assert worker.is_running()


async def test_a_reused_process_id_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names a start time, too: another process with the same number is spared."""
    monkeypatch.setattr(device_lock, "_ORPHAN_ENDS_S", 0.1)
    path = tmp_path / "npu.lock"
    with held(path, 60, "ends") as worker:
        record = path.read_text().replace('"started":', '"started":1')
        path.write_text(record)
        with pytest.raises(DeviceHeld, match="somebody unknown"):
            await DeviceLock(path).claim()
        assert worker.is_running()


async def test_a_worker_of_another_user_is_named_and_reboots_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we have no right to end is for its owner to end: that is no case for a reboot."""
    monkeypatch.setattr(device_lock, "_ORPHAN_ENDS_S", 0.1)

    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with held(tmp_path / "npu.lock", 60, "ends") as worker:
        with monkeypatch.context() as patch:
            patch.setattr("edged.engine.device_lock.os.kill", kill)
            with pytest.raises(DeviceHeld, match=f"worker {worker.pid} of another user"):
                await DeviceLock(tmp_path / "npu.lock").claim()
        assert worker.is_running()


async def test_a_disk_that_takes_no_file_costs_the_lock_not_the_engine(tmp_path: Path) -> None:
    """A full or read-only state folder is said in the log, and the device is used all the same."""
    (tmp_path / "file").write_text("")
    assert await DeviceLock(tmp_path / "file" / "npu.lock").claim() is None


async def test_a_file_system_without_locks_costs_the_lock_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state folder on a share that knows no locks is used, and no file stays open."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("edged.engine.device_lock.fcntl.flock", flock)
    before = psutil.Process().num_fds()
    assert await DeviceLock(tmp_path / "npu.lock").claim() is None
    assert psutil.Process().num_fds() == before


def worker_of(path: Path) -> WorkerEngine:
    launch = wire.Launch("npu", "/nowhere", 2, 1024, 1, 64)
    command = (sys.executable, SCRIPT, "--fault", "none")
    means = Means(command=command, lock=DeviceLock(path))
    return WorkerEngine("npu", "scripted", [Rung("2 slots", launch)], QUICK, means)


async def test_a_device_that_is_never_given_back_asks_for_more_than_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says who holds it, tries on with growing pauses, and is called wedged until it
    serves: that is what a reboot may be configured for."""
    monkeypatch.setattr(device_lock, "_ORPHAN_ENDS_S", 0.1)
    monkeypatch.setattr(device_lock, "_KILLED_ENDS_S", 0.1)
    path = tmp_path / "npu.lock"
    engine = worker_of(path)
    overseer = Overseer([engine], None, Memory(tmp_path), Watch(0, 100.0, 100.0))
    wedged: list[str] = []
    overseer.on_wedged = wedged.append
    with held(path, 60, "ends") as worker:
        with monkeypatch.context() as patch:  # a process in a driver's call outlives SIGKILL
            patch.setattr("edged.engine.device_lock.os.kill", lambda pid, number: None)
            with pytest.raises(EngineFault, match="cannot be killed"):
                await engine.start()
        overseer.look()
        assert "cannot be killed" in wedged[0]
        worker.kill()
        await until(lambda: engine.health().state == "ready")
    overseer.look()
    assert len(wedged) == 1
    await engine.stop()


async def test_a_device_held_by_somebody_unknown_reboots_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says so and tries on until the device is free; nothing is called wedged."""
    monkeypatch.setattr(device_lock, "_ORPHAN_ENDS_S", 0.1)
    path = tmp_path / "npu.lock"
    engine = worker_of(path)
    overseer = Overseer([engine], None, Memory(tmp_path), Watch(0, 100.0, 100.0))
    wedged: list[str] = []
    overseer.on_wedged = wedged.append
    with held(path, 60, "ends") as worker:
        path.write_text("{}")
        with pytest.raises(EngineFault, match="somebody unknown holds"):
            await engine.start()
        await until(lambda: engine.health().restarts == 1)
        overseer.look()
        worker.kill()
        await until(lambda: engine.health().state == "ready")
    assert wedged == []
    await engine.stop()


async def test_the_lock_lives_as_long_as_the_worker(tmp_path: Path) -> None:
    """An engine's worker holds it, a restarted one takes it over, a stopped one gives it back."""
    lock = DeviceLock(tmp_path / "npu.lock")
    command = (sys.executable, SCRIPT, "--fault", "none")
    launch = wire.Launch("npu", "/nowhere", 2, 1024, 1, 64)
    engine = WorkerEngine(
        "npu", "scripted", [Rung("2 slots", launch)], QUICK, Means(command=command, lock=lock)
    )
    try:
        await engine.start()
        assert not can_lock(tmp_path / "npu.lock")
        os.kill(engine.pid or 0, 9)
        await until(lambda: engine.health().restarts == 1 and engine.health().state == "ready")
        assert not can_lock(tmp_path / "npu.lock")
        assert (await engine.run(request(max_tokens=1), ()).__anext__()).token_ids == (1,)
    finally:
        await engine.stop()
    assert can_lock(tmp_path / "npu.lock")


def can_lock(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
