"""`python -m edged.guard.levers.root`: the root helper, one client at a time on a Unix socket.

Fixed verbs and clamped values from an allowed user; whatever it changed is restored when that
client vanishes, on SIGTERM, and by `--restore`. Takes no names of files or commands from anyone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edged.errors import ConfigError
from edged.guard.levers import LeverError
from edged.guard.levers.knobs import Knob, clamped, move
from edged.guard.levers.root_config import read
from edged.guard.levers.saved import Saved

LONGEST_LINE_BYTES = 512
_MOST_PER_S = 50.0
_FIRST_FD = 3  # systemd's
_KEYS = {
    "hello": {"verb"},
    "list": {"verb"},
    "get": {"verb", "name"},
    "set": {"verb", "name", "value"},
    "restore": {"verb", "name"},  # without a name: everything
}


class Helper:
    """Answers lines; knows neither sockets nor signals."""

    def __init__(self, knobs: Sequence[Knob], notes: Sequence[str], saved: Saved) -> None:
        self._knobs = {knob.name: knob for knob in knobs}
        self._notes = list(notes)
        self._saved = saved

    def answer(self, line: bytes) -> dict[str, Any]:
        """Never raises for what a client sends."""
        try:
            return {"ok": True, **self._done(_request(line))}
        except LeverError as error:
            return {"ok": False, "error": str(error)}

    def restore(self, only: str | None = None) -> list[str]:
        problems = self._saved.restore(self._knobs, only)
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
        return problems

    def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        verb = request["verb"]
        if verb == "hello":
            return {"program": "edged-levers", "protocol": 1}
        if verb == "list":
            found = [{"name": k.name, "kind": k.kind, "values": k.values} for k in self._all()]
            return {"levers": found, "notes": self._notes}
        if verb == "restore" and "name" not in request:
            return self._restored(None)
        knob = self._knobs.get(str(request.get("name")))
        if knob is None:
            raise LeverError(f"name: there is {', '.join(self._knobs) or 'no lever here'}")
        if verb == "restore":
            return self._restored(knob.name)
        if verb == "get":
            return {"value": knob.read()}
        value = clamped(knob.kind, knob.values, request.get("value", ""))
        self._saved.keep(knob)
        return {"value": move(knob, value), "target": value}

    def _restored(self, only: str | None) -> dict[str, Any]:
        problems = self.restore(only)
        if problems:
            raise LeverError("; ".join(problems))
        return {}

    def _all(self) -> list[Knob]:
        return list(self._knobs.values())


def _request(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line, parse_int=float)
    except (ValueError, RecursionError):
        raise LeverError("a request is one line of JSON") from None
    verb = found.get("verb") if isinstance(found, dict) else None
    if not isinstance(verb, str) or verb not in _KEYS:
        raise LeverError(f"verb: there is {', '.join(_KEYS)}")
    unknown = found.keys() - _KEYS[verb]
    if unknown:
        raise LeverError(f"{verb} takes no {min(unknown)[:40]!r}")
    return dict(found)


class Server:
    """The socket side. wake: readable when a signal asked to stop."""

    def __init__(self, listener: socket.socket, wake: socket.socket, uids: frozenset[int]) -> None:
        self._listener, self._wake, self._uids = listener, wake, uids
        self._stopping = False
        self._client: socket.socket | None = None

    def run(self, helper: Helper, idle_s: float) -> None:
        """Until a signal, or idle_s without a client: the socket unit starts us again."""
        while not self._stopping:
            ready = self._ready(None, idle_s)
            if not ready:
                return
            if self._listener in ready:
                client = self._accepted()
                if client is not None:
                    with client:
                        try:
                            self._converse(client, helper)
                        finally:
                            helper.restore()

    def _converse(self, client: socket.socket, helper: Helper) -> None:
        """Until end of file, a line too long, a client that does not read, or a signal."""
        client.settimeout(1.0)
        self._client = client
        try:
            for line in self._lines(client):
                _say(client, helper.answer(line))
        except OSError:
            pass  # gone: what it changed is restored by the caller
        finally:
            self._client = None

    def _lines(self, client: socket.socket) -> Iterator[bytes]:
        rest = b""
        while True:
            ready = self._ready(client, None)
            if self._stopping:
                return
            if client not in ready:
                self._accepted()  # only now: whom the end of this one makes room for may wait
                continue
            data = client.recv(4096)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if self._stopping or len(line) > LONGEST_LINE_BYTES:
                    break
                time.sleep(1 / _MOST_PER_S)  # the rate: a flood waits in its own socket buffer
                yield line
            if max(map(len, [*lines, rest])) > LONGEST_LINE_BYTES:
                _say_last(client, "the line is too long")
                return

    def _accepted(self) -> socket.socket | None:
        """The next client, or None when it was refused, in words."""
        with contextlib.suppress(OSError):
            client = self._listener.accept()[0]
            _, uid, _ = struct.unpack(
                "3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            words = ""
            if uid not in self._uids:
                words = f"user {uid} may not move levers; name yours as user in levers.toml"
            elif self._client is not None:
                words = "another program holds the levers; stop it first"
            if not words:
                return client
            with client:
                client.settimeout(0.1)
                _say_last(client, words)
        return None

    def _ready(self, client: socket.socket | None, timeout_s: float | None) -> list[socket.socket]:
        watched = [self._wake, self._listener, *([client] if client else [])]
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._wake in ready:
            self._stopping = True
        return list(ready)


def _say(client: socket.socket, words: dict[str, Any]) -> None:
    client.sendall(json.dumps(words).encode() + b"\n")


def _say_last(client: socket.socket, words: str) -> None:
    """Then nothing unread may be left: closing would reset the connection and lose the words."""
    _say(client, {"ok": False, "error": words})
    client.shutdown(socket.SHUT_RD)
    while client.recv(65536):
        pass


# --- program -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 something was not restored, 78 a mistake in levers.toml."""
    args = _parser().parse_args(argv)
    saved = Saved(args.saved)
    if args.restore and not args.saved.exists():
        return 0
    try:
        allowed = read(args.config, args.sysfs)
        saved.hold()
        helper = Helper(allowed.knobs, allowed.notes, saved)
        left = helper.restore()  # by one that was killed
        if args.restore:
            return 1 if left else 0
        with _wake_on_signals() as wake, _listener(args.socket) as listener:
            Server(listener, wake, allowed.uids).run(helper, args.idle_s)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 78
    except LeverError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edged-levers", description="moves fan and clock as root")
    parser.add_argument("--config", type=Path, default=Path("/etc/edged/levers.toml"))
    parser.add_argument("--saved", type=Path, default=Path("/var/lib/edged-levers/saved.json"))
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--socket", type=Path, help="listen here (default: systemd's socket)")
    parser.add_argument("--idle-s", type=float, default=60.0, help="end when unused for so long")
    parser.add_argument("--restore", action="store_true", help="only undo what is left, and end")
    return parser


@contextlib.contextmanager
def _wake_on_signals() -> Iterator[socket.socket]:
    """Signals only wake the loop, so that none strikes between a change and its record."""
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with wake, waker:
        yield wake


def _listener(path: Path | None) -> socket.socket:
    if path is None:
        given = os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS")
        if given != "1" or not stat.S_ISSOCK(os.fstat(_FIRST_FD).st_mode):
            raise LeverError("no socket from systemd; start edged-levers.socket, or use --socket")
        return socket.socket(fileno=_FIRST_FD)
    listener = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    path.chmod(0o660)
    listener.listen(4)
    return listener


if __name__ == "__main__":
    sys.exit(main())
