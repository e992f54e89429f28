"""The waiting room: bounded by requests and by tokens; who is next is a pure function.

Knows nothing of engines or text. Times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edged.core import Request

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Waiting(Generic[Item]):
    request: Request
    since_s: float
    item: Item
    first: bool = False  # has begun elsewhere: before all others


def urgency(waiting: Waiting[Item], now_s: float, running: Sequence[str], aging_s: float) -> float:
    """Higher goes first: what has begun; then priority, plus one level per aging_s waited, minus
    one level per stream that the same client already has running (fair share)."""
    if waiting.first:
        return math.inf
    aged = (now_s - waiting.since_s) / aging_s
    return waiting.request.priority + aged - running.count(waiting.request.client)


def cost_tokens(request: Request) -> int:
    """What a waiting request will occupy at most: its prompt and its answer."""
    return len(request.prompt_ids) + request.max_tokens


class Queue(Generic[Item]):
    def __init__(self, max_requests: int, max_tokens: int, aging_s: float) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._aging_s = aging_s
        self._waiting: list[Waiting[Item]] = []  # in order of arrival
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, request: Request) -> bool:
        """A request larger than the whole token bound still fits an empty queue."""
        if len(self._waiting) >= self._max_requests:
            return False
        return not self._waiting or self._tokens + cost_tokens(request) <= self._max_tokens

    def push(self, waiting: Waiting[Item]) -> None:
        self._waiting.append(waiting)
        self._tokens += cost_tokens(waiting.request)

    def pop(
        self, now_s: float, running: Sequence[str], suits: Callable[[Item], bool]
    ) -> Waiting[Item] | None:
        """The most urgent one that suits, among equals the oldest; None when none does."""
        best = max(
            (waiting for waiting in self._waiting if suits(waiting.item)),
            key=lambda w: urgency(w, now_s, running, self._aging_s),
            default=None,
        )
        if best is not None:
            self._remove(best)
        return best

    def discard(self, item: Item) -> None:
        for waiting in self._waiting:
            if waiting.item is item:
                return self._remove(waiting)
        return None

    def _remove(self, waiting: Waiting[Item]) -> None:
        self._waiting.remove(waiting)
        self._tokens -= cost_tokens(waiting.request)

    def oldest_wait_s(self, now_s: float) -> float:
        return now_s - self._waiting[0].since_s if self._waiting else 0.0
