"""The daemon's side of the root helper: its levers over one connection.

While the connection lives the helper keeps what was set; when it ends the helper restores. Every
request has a time-out, after which the connection is given up and made anew by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from edged.guard.levers import Kind, LeverError

_CONNECT_S = 2.0
_ANSWER_S = 30.0  # a set and its read-back may need several slow vendor calls
_LONGEST_ANSWER_BYTES = 65536


class HelperLink:
    """One connection, used by all levers of the helper in turn."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
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
            if self._streams is None or self._streams[0].at_eof():
                await self._connect()
                # A helper that died has restored everything: the other levers' places, again.
                for name, value in self._targets.items():
                    if name != request.get("name"):
                        await self._exchange({"verb": "set", "name": name, "value": value})
            return await self._exchange(request)

    def close(self) -> None:
        """The helper restores what is not restored yet."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _connect(self) -> None:
        self.close()
        opening = asyncio.open_unix_connection(self._path, limit=_LONGEST_ANSWER_BYTES)
        try:
            self._streams = await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            words = getattr(error, "strerror", None) or "no answer"
            raise LeverError(
                f"no helper at {self._path}: {words}; see systemd/edged-levers.socket"
            ) from None

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._streams is None:
            raise LeverError("the helper is gone")
        reader, writer = self._streams
        answered = False
        try:
            with contextlib.suppress(ConnectionError):  # a refusal may lie there already
                writer.write(json.dumps(request).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _CONNECT_S)
            line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
            answer = json.loads(line) if line else None
            answered = isinstance(answer, dict)
        except asyncio.TimeoutError:
            raise LeverError(f"the helper did not answer within {_ANSWER_S:g} s") from None
        except (OSError, ValueError):
            answer = None
        finally:
            if not answered:  # cancelled included: a late answer must not be taken for another's
                self.close()
        if not isinstance(answer, dict):
            raise LeverError("the helper ended the connection")
        if answer.get("ok") is not True:
            raise LeverError(str(answer.get("error", "the helper refused")))
        return answer


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
