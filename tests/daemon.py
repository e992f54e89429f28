"""The real daemon as a process, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from broker import free_port

from edged.machine import default_state_dir

START_S = 120.0


class Daemon:
    """`edged run` on a free port with a folder of its own; models come from the usual place.

    redirect: what a shell would put behind the command, such as ">/dev/full 2>&-".
    """

    def __init__(
        self,
        *sets: str,
        environ: dict[str, str] | None = None,
        redirect: str = "",
        cwd: Path | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="edged-daemon-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket = self.folder / "api.sock"
        self._log = self.folder / "log"
        base = (f"http.port={self.port}", f"http.unix_socket={self.socket}", "node=test")
        if not any(item.startswith("state_dir=") for item in sets) and not environ:
            base += (f"state_dir={self._state_dir()}",)
        command = [sys.executable, "-m", "edged", "run"]
        for item in (*base, *sets):
            command += ["--set", item]
        if redirect:
            command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environ or {})},
                cwd=cwd,
            )

    def _state_dir(self) -> Path:
        """Of its own, for a device has one daemon; but models are exported once for all."""
        state_dir, models = self.folder / "state", default_state_dir() / "models"
        state_dir.mkdir()
        models.mkdir(parents=True, exist_ok=True)
        (state_dir / "models").symlink_to(models)
        return state_dir

    def get(self, path: str, timeout_s: float = 10.0) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            body = response.read()
        with contextlib.suppress(ValueError):
            return json.loads(body)
        return body.decode()

    def wait_ready(self) -> Daemon:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.log}")
            with contextlib.suppress(OSError):
                if self.get("/edged/v1/status")["ready"]:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"not ready within {START_S} s: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child
                for child in psutil.Process(self.process.pid).children()
                if "edged.worker" in child.cmdline()
            ]
        return []

    def running(self) -> int:
        return int(self.get("/edged/v1/status")["running"])

    def slots_busy(self) -> int:
        """As the worker of the first engine tells it."""
        return int(self.get("/edged/v1/status")["engines"][0]["running"])

    def steps(self, kind: str) -> int:
        """Steps of the CPU engine so far: "prefill" or "decode"."""
        line = rf'^edged_engine_step_seconds_count{{engine="cpu",kind="{kind}"}} ([\d.]+)$'
        found = re.search(line, self.get("/metrics"), flags=re.M)
        return int(float(found[1])) if found else 0

    def stop(self, signum: int = signal.SIGTERM, within_s: float = 60.0) -> int:
        self.process.send_signal(signum)
        return self.process.wait(within_s)

    def close(self) -> None:
        workers = self.workers()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        psutil.wait_procs(workers, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def daemon(
    *sets: str, environ: dict[str, str] | None = None, redirect: str = ""
) -> Iterator[Daemon]:
    """A ready daemon, gone afterwards with everything it started."""
    made = Daemon(*sets, environ=environ, redirect=redirect)
    try:
        yield made.wait_ready()
    finally:
        made.close()
