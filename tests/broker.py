"""A real mosquitto on a free port, and its command-line clients, for any test that wants them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

START_S = 10.0


class Broker:
    """One mosquitto process. listener, config: lines for mosquitto.conf(5); {folder} in them is
    a folder the broker can read. files: written there, by name."""

    def __init__(
        self, config: str = "", listener: str = "", files: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="edged-broker-"))
        self._folder.chmod(0o755)  # as root mosquitto becomes user mosquitto before it reads
        for name, content in (files or {}).items():
            (self._folder / name).write_text(content)
            (self._folder / name).chmod(0o644)
        config = config.replace("{folder}", str(self._folder))
        listener = listener.replace("{folder}", str(self._folder))
        self._config = self._folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\n{listener}\n"
            f"{'' if 'allow_anonymous' in config else 'allow_anonymous true'}\n"
            f"persistence false\nset_tcp_nodelay true\n{config}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-c", str(self._config)], stdout=log, stderr=log
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"mosquitto did not start: {self.log()}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def signal(self, how: signal.Signals) -> None:
        """SIGSTOP and SIGCONT make a broker that hangs and recovers."""
        assert self._process is not None
        self._process.send_signal(how)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def broker(
    config: str = "", listener: str = "", files: Mapping[str, str] | None = None
) -> Iterator[Broker]:
    """A running broker, gone afterwards."""
    made = Broker(config, listener, files)
    try:
        made.start()
        yield made
    finally:
        made.close()


def free_port() -> int:
    """Below the range that outgoing connections take theirs from, so that none takes it first."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def tool(name: str, *arguments: str, within_s: float = 20.0) -> str:
    """Run mosquitto_pub, mosquitto_sub or mosquitto_rr to its end; its output."""
    process = await asyncio.create_subprocess_exec(
        name, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), within_s)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"{name} did not end within {within_s} s") from None
    assert process.returncode == 0, (name, arguments, err.decode())
    return out.decode()
