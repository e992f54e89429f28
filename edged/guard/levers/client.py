"""The daemon's side of the root helper: its levers over one connection.

While the connection lives the helper keeps what was set; when it ends the helper restores. Every
request has a time-out, after which the connection is given up and made anew by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass
from typing import Any

from edged.guard.levers import Kind, LeverError

_CONNECT_S = 2.0
_ANSWER_S = 30.0  # a set and its read-back may need several slow vendor calls
_LONGEST_ANSWER_BYTES = 65536


class HelperLink:
    """One connection, used by all levers of the helper in turn."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._turn = asyncio.Lock()
        self._socket: socket.socket | None = None  # bare: a stream loses the words of a refusal
        self._targets: dict[str, float] = {}
        self.users: set[str] = set()

    async def levers(self) -> tuple[list[HelperLever], list[str]]:
        """(what it offers, what it misses in words). Raises LeverError without a helper."""
        found = await self.ask({"verb": "list"})
        try:
            offered = [
                HelperLever(self, str(one["name"]), one["kind"], tuple(map(float, one["values"])))
                for one in found["levers"]
            ]
            return offered, [str(note) for note in found["notes"]]
        except (KeyError, TypeError, ValueError):
            raise LeverError(
                "the helper's list is not understood; is it the same version?"
            ) from None

    async def set(self, name: str, value: float) -> float:
        answer = await self.ask({"verb": "set", "name": name, "value": value})
        self._targets[name] = value
        return float(answer["value"])

    async def restore(self, name: str) -> None:
        self._targets.pop(name, None)
        await self.ask({"verb": "restore", "name": name})

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises LeverError with the helper's words, or when it does not answer."""
        async with self._turn:
            if not self._alive():
                await self._connect()
                # A helper that died has restored everything: the other levers' places, again.
                for name, value in self._targets.items():
                    if name != request.get("name"):
                        await self._exchange({"verb": "set", "name": name, "value": value})
            return await self._exchange(request)

    def close(self) -> None:
        """The helper restores what is not restored yet."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _alive(self) -> bool:
        """Between two requests nothing is there to read: something means the end."""
        if self._socket is None:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def _connect(self) -> None:
        self.close()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        opening = asyncio.get_running_loop().sock_connect(self._socket, self.path)
        try:
            await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            self.close()
            words = getattr(error, "strerror", None) or "no answer"
            raise LeverError(
                f"no helper at {self.path}: {words}; see systemd/edged-levers.socket"
            ) from None

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: Any = None
        try:
            line = await asyncio.wait_for(self._told(request), _ANSWER_S)
            answer = json.loads(line) if line else None
        except asyncio.TimeoutError:
            raise LeverError(f"the helper did not answer within {_ANSWER_S:g} s") from None
        except (OSError, ValueError):
            pass  # it ended in the middle: told below
        finally:
            if not isinstance(answer, dict):  # a late answer must not be taken for another's
                self.close()
        if not isinstance(answer, dict):
            raise LeverError("the helper ended the connection")
        if answer.get("ok") is not True:
            raise LeverError(str(answer.get("error", "the helper refused")))
        return answer

    async def _told(self, request: dict[str, Any]) -> bytes:
        """The answer's line; empty at the end of the connection."""
        if self._socket is None:
            return b""
        loop, found = asyncio.get_running_loop(), b""
        with contextlib.suppress(BrokenPipeError):  # refused already: the words lie there
            await loop.sock_sendall(self._socket, json.dumps(request).encode() + b"\n")
        while not found.endswith(b"\n") and len(found) < _LONGEST_ANSWER_BYTES:
            data = await loop.sock_recv(self._socket, 4096)
            if not data:
                return b""
            found += data
        return found


@dataclass(frozen=True)
class HelperLever:
    """One lever of the helper."""

    link: HelperLink
    name: str
    kind: Kind
    values: tuple[float, ...]

    async def set(self, value: float) -> float:
        return await self.link.set(self.name, value)

    async def restore(self) -> None:
        await self.link.restore(self.name)

    async def stop(self) -> None:
        with contextlib.suppress(LeverError):  # then the end of the connection restores
            await self.restore()
        self.link.users.discard(self.name)
        if not self.link.users:
            self.link.close()
