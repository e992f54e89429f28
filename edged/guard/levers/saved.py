"""What was there before the first change: a small file that outlives every process.

Written and synced before a lever moves, removed when all is restored; what cannot be restored
stays in it for the next start. One process at a time. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from edged.guard.levers import LeverError
from edged.guard.levers.knobs import Knob, Original

_MOST_BYTES = 65536


class Saved:
    """The file and its lock, which the kernel drops with its holder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def hold(self) -> None:
        """Raises LeverError when another process moves these levers, or there is no place."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self.path.with_name(self.path.name + ".lock").open("w")
        except OSError as error:
            raise LeverError(f"cannot keep {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise LeverError("another process moves these levers; stop it first") from None
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load(self) -> dict[str, Original]:
        """Empty when nothing was changed. Raises LeverError when the file is none of ours."""
        try:
            with self.path.open("rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise LeverError(f"cannot use {self.path}: {error}; remove it") from None
        if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
            raise LeverError(f"{self.path} is not a list of originals; remove it")
        return found

    def keep(self, knob: Knob) -> None:
        """Before the first change of knob: its present state is on the disk when this returns."""
        found = self.load()
        if knob.name not in found:
            self._store({**found, knob.name: knob.original()})

    def restore(self, knobs: Mapping[str, Knob], only: str | None = None) -> list[str]:
        """Everything kept, or one; returns what did not work, in words."""
        try:
            found = self.load()
        except LeverError as error:
            return [str(error)]
        problems = []
        for name in [name for name in found if only in (None, name)]:
            try:
                _restore(knobs, name, found[name])
            except LeverError as error:
                problems.append(f"{name}: not restored: {error}")
            else:
                del found[name]
        try:
            self._store(found)
        except LeverError as error:
            problems.append(str(error))
        return problems

    def _store(self, originals: Mapping[str, Original]) -> None:
        try:
            if not originals:
                self.path.unlink(missing_ok=True)
            else:
                temporary = self.path.with_name(self.path.name + ".new")
                with temporary.open("w") as file:
                    json.dump(originals, file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise LeverError(f"cannot keep {self.path}: {error.strerror}") from None


def _restore(knobs: Mapping[str, Knob], name: str, original: Original) -> None:
    if name not in knobs:
        raise LeverError("is not here any more")
    try:
        knobs[name].restore(original)
    except (KeyError, ValueError, TypeError):
        raise LeverError(f"kept as {original!r}, which is not its form") from None
