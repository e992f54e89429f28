"""The child process that touches drivers: one JSON line of answer per line of input.

`python -m edged.guard.sensors.helper dcmi LIBRARY CHIP` or `... linux ROOT NAME`. It may hang or
crash at any call; the daemon kills it and starts another. Standard library only, to start fast.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from edged.guard.sensors import Raw, SensorError

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(arguments: Sequence[str]) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vendors' libraries print
    if sys.platform == "linux":
        # A call that hangs would not see the end of our input.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    read = _source(arguments)
    for _ in sys.stdin.buffer:
        try:
            answer = asdict(read())
        except SensorError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 a defect here is a lost sensor, told in words
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, allow_nan=False) + "\n")
        answers.flush()
    return 0


def _source(arguments: Sequence[str]) -> Callable[[], Raw]:
    kind, *rest = arguments
    if kind == "dcmi":
        return _Lasting(rest[0], int(rest[1])).read
    from edged.guard.sensors import linux

    return partial(linux.read, rest[0], rest[1])


class _Lasting:
    """DCMI is opened at the first question and stays open; an open that fails is tried again."""

    def __init__(self, library: str, chip: int) -> None:
        from edged.guard.sensors.dcmi import Dcmi

        self._open: Callable[[], Dcmi] = partial(Dcmi, library, chip)
        self._dcmi: Dcmi | None = None

    def read(self) -> Raw:
        if self._dcmi is None:
            self._dcmi = self._open()
        return self._dcmi.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
