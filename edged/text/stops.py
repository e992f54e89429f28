"""StopMatcher: finds stop strings in a growing text and never lets a part of one leak.

Pure: no tokens, no clock. Text goes in in any pieces; what comes out does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feeds on pieces of text and holds back only what may still become a stop string.

    The stop string that is complete first wins, and of several complete at the same
    character the longest; the text from its first character on is never emitted.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty; leave it out")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    @property
    def held(self) -> str:
        """Text seen but not emitted yet: it begins a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """(text now safe to emit, True once a stop string is complete). After that: ("", True)."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        buffer = self._held + text
        start = _first_complete(buffer, self._stops)
        if start is not None:
            self._stopped = True
            self._held = ""
            return buffer[:start], True
        keep = max(_partial_length(buffer, stop) for stop in self._stops)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """At the end of the stream: what was held back, as no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _first_complete(buffer: str, stops: Sequence[str]) -> int | None:
    """Start of the stop string that ends first (the longest of those), or None."""
    found = [(at + len(stop), at) for stop in stops if (at := buffer.find(stop)) >= 0]
    return min(found)[1] if found else None


def _partial_length(buffer: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends the buffer."""
    at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(buffer[at:]):
            return len(buffer) - at
        at = buffer.find(stop[0], at + 1)
    return 0
