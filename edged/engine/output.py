"""OutputLog: what a worker prints, line by line into the log, at a bounded rate and length."""

from __future__ import annotations

from collections.abc import Callable

LINES_PER_S = 20
MAX_LINE_BYTES = 1000


class OutputLog:
    """write(line) gets each line that is let through, dropped(count) what was not."""

    def __init__(self, write: Callable[[str], None], dropped: Callable[[int], None]) -> None:
        self._write = write
        self._tell_dropped = dropped
        self._rest = b""
        self._second_s = float("-inf")
        self._lines = 0

    def feed(self, data: bytes, now_s: float) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:MAX_LINE_BYTES]  # the end of an endless line is not kept
        for line in lines:
            self._take(line, now_s)

    def end(self, now_s: float) -> None:
        """Nothing more comes: an unfinished line counts too."""
        if self._rest:
            self._take(self._rest, now_s)
            self._rest = b""
        self._settle()

    def _take(self, line: bytes, now_s: float) -> None:
        if now_s - self._second_s >= 1.0:
            self._settle()
            self._second_s = now_s
        self._lines += 1
        if self._lines <= LINES_PER_S:
            self._write(line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip())

    def _settle(self) -> None:
        if self._lines > LINES_PER_S:
            self._tell_dropped(self._lines - LINES_PER_S)
        self._lines = 0
