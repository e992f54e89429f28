"""Deadline: who is blamed for a frame that does not come, and who is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from edged.engine.deadline import Deadline

SLEEPER = """
import asyncio, sys
from edged.engine.deadline import Deadline

async def main():
    blamed = []
    deadline = Deadline(blamed.append)
    feed = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(feed), sys.stdin)
    deadline.expect(1.0, "step")
    print("armed", flush=True)
    await feed.readexactly(1)
    deadline.cancel()
    print(blamed, flush=True)

asyncio.run(main())
"""


async def test_a_frame_that_does_not_come_is_told_once_with_what_and_when() -> None:
    """After the promised time and half of it again, not before."""
    told: list[str] = []
    deadline = Deadline(told.append)
    deadline.expect(0.2, "step")
    await asyncio.sleep(0.1)
    assert deadline.pending
    assert told == []
    await asyncio.sleep(0.8)
    assert told == ["worker hung: step did not end within 0.3 s"]
    assert not deadline.pending


async def test_a_loop_that_was_asleep_grants_the_time_again() -> None:
    """The timer fires long after it was due: the worker may have been asleep, too; it has its
    whole time once more, and then it is blamed."""
    told: list[str] = []
    deadline = Deadline(told.append)
    deadline.expect(0.2, "step")
    asyncio.get_running_loop().call_soon(_block)
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert told == []
    assert deadline.pending
    await asyncio.sleep(0.6)
    assert len(told) == 1


def _block() -> None:
    time.sleep(1.6)


def test_a_stopped_process_reads_what_is_there_before_it_blames() -> None:
    """SIGSTOP for longer than the deadline while the frame arrives: nobody is blamed."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"armed\n"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            child.stdin.write(b"x")
            child.stdin.flush()
            time.sleep(3.0)  # 1.5 s until it is due, and more than a second late
            child.send_signal(signal.SIGCONT)
            assert child.stdout.readline() == b"[]\n"
        finally:
            child.kill()
