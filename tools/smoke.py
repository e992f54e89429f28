"""Start the real daemon with the interpreter that runs this file, ask one chat, stop it.

Standard library only, so that it runs in an environment without development packages.
Exit 0: the answer had text and SIGTERM ended the daemon with status 0. Takes no arguments;
the model is the one `edged models fetch demo` left in the state folder.
"""

from __future__ import annotations

import json
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S, ANSWER_S, STOP_S = 300.0, 120.0, 60.0
LOG_TAIL_CHARS = 4000


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="edged-smoke-") as folder:
        log = Path(folder) / "log"
        port = free_port()
        command = [sys.executable, "-m", "edged", "run", "--set", f"http.port={port}"]
        command += ["--set", f"http.unix_socket={folder}/api.sock"]
        with log.open("wb") as out:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            print(f"smoke: Python {platform.python_version()}: {check(daemon, port)}")
        except SmokeError as error:
            tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
            print(f"smoke: Python {platform.python_version()}: {error}\n{tail}", file=sys.stderr)
            return 1
        finally:
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait()
    return 0


class SmokeError(Exception):
    """What did not work, in words."""


def check(daemon: subprocess.Popen[bytes], port: int) -> str:
    """The whole visit; a line about it. Raises SmokeError."""
    base = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    wait_until_ready(daemon, base)
    ready_s = time.monotonic() - began
    answer = chat(base, "Name three colours.")
    daemon.send_signal(signal.SIGTERM)
    try:
        status = daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise SmokeError(f"the daemon did not end {STOP_S:.0f} s after SIGTERM") from None
    if status != 0:
        raise SmokeError(f"the daemon ended with status {status} after SIGTERM")
    return f"ready after {ready_s:.1f} s, answered {answer!r}, ended with status 0"


def wait_until_ready(daemon: subprocess.Popen[bytes], base: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if daemon.poll() is not None:
            raise SmokeError(f"the daemon ended with status {daemon.returncode} at start")
        try:
            with urllib.request.urlopen(f"{base}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):  # not listening yet, or 503: loading
            time.sleep(0.2)
    raise SmokeError(f"the daemon was not ready after {START_S:.0f} s")


def chat(base: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "seed": 1}
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        json.dumps(body | {"model": first_model(base)}).encode(),
        {"Content-Type": "application/json"},
    )
    answer = fetch(request)
    text = answer["choices"][0]["message"]["content"]
    if not isinstance(text, str) or not text.strip():
        raise SmokeError(f"the answer is empty: {answer}")
    if answer["usage"]["completion_tokens"] < 1:
        raise SmokeError(f"the answer's usage is wrong: {answer}")
    return text


def first_model(base: str) -> str:
    return str(fetch(urllib.request.Request(f"{base}/v1/models"))["data"][0]["id"])


def fetch(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise SmokeError(f"{request.full_url}: {error.code} {error.read()[:500]!r}") from None
    except (OSError, ValueError) as error:
        raise SmokeError(f"{request.full_url}: {error}") from None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
