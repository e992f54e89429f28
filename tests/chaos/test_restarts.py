"""The daemon itself ends or its disk and its log do: what was promised then, and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from chaos.checks import expect_ended, expect_whole
from chaos.clients import Ask
from chaos.lab import Home, Lab, lab
from edged.machine import default_state_dir

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


@contextlib.contextmanager
def tiny_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of that size, for whoever may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Not one byte is free afterwards."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError), (folder / "crumbs").open("wb", buffering=0) as file:
        while True:
            file.write(b"x")


async def test_sigterm_lets_running_streams_end(chaos_home: Home) -> None:
    """A stop in mid-stream: what runs ends whole, exit code 0, no worker and no socket file is
    left; the next daemon on the same folder serves from the NPU."""
    async with lab(chaos_home) as made:
        async with made.crowd() as answers:
            await made.begun(8)
            made.note()
            made.daemon.process.send_signal(signal.SIGTERM)
            tolds = await answers
        assert await asyncio.to_thread(made.daemon.process.wait, 60) == 0, made.tail()
        for told in tolds:
            expect_ended(made, told, may_fail={"shutting_down"})
        assert sum(not told.code for told in tolds) >= 7, [told.code for told in tolds]
        assert not made.daemon.socket.exists()
        assert not [worker for worker in made.seen if alive(worker)]
        await made.restart()
        await expect_whole(made, [], repeats=True)


async def test_a_killed_daemon_is_replaced_at_once(chaos_home: Home) -> None:
    """kill -9 of the daemon in mid-stream: its clients hear that the connection is gone, no worker
    keeps the device from the next daemon, and what is asked again is answered whole."""
    async with lab(chaos_home) as made:
        async with made.crowd() as answers:
            await made.begun(8)
            made.note()
            made.daemon.process.kill()
            await made.restart()
            again = await asyncio.gather(
                *(made.ask(ask) for ask in chaos_home.crowd() if ask.way == "mqtt")
            )
            for one in made.mqtt.told.values():
                one.end("given up") if not one.ends else None
            tolds = await answers
        for told in tolds:
            if told.ask.way != "mqtt":
                assert told.code.startswith("connection: "), told
                truth = chaos_home.truth(told.ask)
                assert truth is not None
                assert truth.startswith(told.text.rstrip("\ufffd")), told
        await expect_whole(made, again, repeats=True)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


async def test_a_full_disk_costs_no_answer(chaos_home: Home, tmp_path: Path) -> None:
    """Not a byte is free for the state folder while the NPU's worker dies under load: every
    stream is whole, the worker comes back, and so does a whole daemon on the full disk."""
    with tiny_disk(tmp_path / "disk", mib=2) as disk:
        async with lab(chaos_home, state_dir=disk) as made:
            fill(disk)
            worker = made.worker("npu")
            async with made.crowd() as answers:
                await made.begun(8)
                worker.kill()
                tolds = await answers
            await expect_whole(made, tolds)
            made.daemon.process.kill()
            await made.restart()
            await expect_whole(made, [], repeats=True)
            assert shutil.disk_usage(disk).free == 0


@contextlib.asynccontextmanager
async def read_by(home: Home, folder: Path) -> AsyncIterator[tuple[Lab, int]]:
    """A daemon whose output goes into a pipe, and the end it is read from."""
    fifo = folder / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    async with lab(home, redirect=f">{fifo} 2>&1") as made:
        yield made, reader


async def test_a_log_that_nobody_reads_costs_no_answer(chaos_home: Home, tmp_path: Path) -> None:
    """First the log's pipe runs full, then its reader dies, both under load with a worker killed:
    every stream is whole, and the daemon still ends with 0."""
    async with read_by(chaos_home, tmp_path) as (made, reader):
        worker = made.worker("npu")
        async with made.crowd() as answers:
            await made.begun(8)
            worker.kill()  # nobody has read a byte so far
            tolds = await answers
        await expect_whole(made, tolds)
        worker = made.worker("npu")
        async with made.crowd() as answers:
            await made.begun(8)
            os.close(reader)
            worker.kill()
            tolds = await answers
        await expect_whole(made, tolds)
        assert await asyncio.to_thread(made.daemon.stop) == 0


@pytest.mark.model
async def test_words_go_on_where_they_were(tmp_path: Path) -> None:
    """With the demo model, greedy and in fp32: the text of a stream whose engine was killed is,
    word for word, that of an undisturbed one."""
    from reference import demo_gguf

    (tmp_path / "models").symlink_to(default_state_dir() / "models")
    home = Home(tmp_path, demo_gguf(), [])
    ask = Ask("The capital of France is", 48)
    async with lab(home, "npu.context_gears=[512]") as made:
        undisturbed = await made.ask(ask)
        worker = made.worker("npu")
        task = asyncio.create_task(made.ask(ask))
        await made.begun(1)
        await asyncio.sleep(0.5)
        worker.kill()
        told = await task
        assert told.wrote == ["npu", "cpu"], told
        assert told.text == undisturbed.text
        assert len(told.text.split()) > 10
        await expect_whole(made, [told])
