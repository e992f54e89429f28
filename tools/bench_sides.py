"""The two servers a bench compares, each in its own process, with the same model and limits.

`arguments` has model, threads, slots and context_tokens (per slot).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TOOLS = Path(__file__).parent
START_S, STOP_S = 300.0, 60.0


@dataclass(frozen=True)
class Side:
    name: str
    base: str
    model: str
    process: psutil.Process


@contextlib.contextmanager
def llama_side(arguments: argparse.Namespace) -> Iterator[Side]:
    command = [sys.executable, str(TOOLS / "llama_server.py"), "--model", str(arguments.model)]
    command += ["--slots", str(arguments.slots), "--threads", str(arguments.threads)]
    command += ["--context-tokens", str(arguments.context_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            base = child.stdout.readline().decode().strip()
            if not base:
                raise SystemExit("bench: llama.cpp did not start")
            yield Side("llama.cpp", base, model_of(base), psutil.Process(child.pid))
        finally:
            child.terminate()


@contextlib.contextmanager
def edged_side(arguments: argparse.Namespace) -> Iterator[Side]:
    base = f"http://127.0.0.1:{(port := free_port())}"
    settings = {
        "http.port": port,
        "http.unix_socket": "",
        "model.path": arguments.model,
        "model.context_tokens": arguments.context_tokens,
        "cpu.slots": arguments.slots,
        "cpu.threads": arguments.threads,
        "log.level": "warning",
    }
    command = [sys.executable, "-m", "edged", "run"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        try:
            wait_until_ready(child, base)
            yield Side("edged", base, model_of(base), psutil.Process(child.pid))
        finally:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
            child.kill()


def wait_until_ready(child: subprocess.Popen[bytes], base: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):  # not listening yet, or 503: loading
            time.sleep(0.2)
    raise SystemExit("bench: edged did not become ready")


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def model_of(base: str) -> str:
    return str(fetch(f"{base}/v1/models")["data"][0]["id"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
