"""Recent: answers of the last minutes, so that a repeated request is not generated twice.

A bounded table; plain data, time is given. Holds answers only, never prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edged.ingress.mqtt.messages import Outgoing

TTL_S = 600.0
MAX_ENTRIES = 4096
MAX_BYTES = 8 << 20

Key = tuple[str, str]  # reply topic, request id


@dataclass(frozen=True)
class Answered:
    digest: bytes
    answer: Outgoing
    at_s: float


class Recent:
    """The youngest answers, within a time to live, a count and a size."""

    def __init__(
        self, ttl_s: float = TTL_S, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._table: OrderedDict[Key, Answered] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._table)

    def find(self, key: Key, now_s: float) -> Answered | None:
        self._forget(now_s)
        return self._table.get(key)

    def keep(self, key: Key, digest: bytes, answer: Outgoing, now_s: float) -> None:
        self._drop(key)
        self._table[key] = Answered(digest, answer, now_s)
        self.size_bytes += answer.size_bytes
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """The table is in order of time, so the oldest is always the first."""
        while self._table:
            key, oldest = next(iter(self._table.items()))
            full = len(self._table) > self._max_entries or self.size_bytes > self._max_bytes
            if not full and now_s - oldest.at_s < self._ttl_s:
                return
            self._drop(key)

    def _drop(self, key: Key) -> None:
        gone = self._table.pop(key, None)
        if gone is not None:
            self.size_bytes -= gone.answer.size_bytes
