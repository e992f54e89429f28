"""Handles: what the library hands out as plain ints, and what each of them stands for.

A wild or stale handle crashes the real library; here it gets a code.
"""

from __future__ import annotations

from typing import Any, TypeVar

from edged.twin.acl import codes
from edged.twin.acl.codes import Failure

Thing = TypeVar("Thing")
_STEP = 0x40  # handles look like heap addresses


class Handles:
    def __init__(self) -> None:
        self._things: dict[int, Any] = {}
        self.version = 0  # changes with every handle, and with what data sets are made of
        self._last = 0xAAAA_C000_0000

    def add(self, thing: Any) -> int:
        self._last += _STEP
        self.version += 1
        self._things[self._last] = thing
        return self._last

    def get(self, handle: int, kind: type[Thing], code: int = codes.RT_PARAM_INVALID) -> Thing:
        """Raises Failure(code) unless the handle is alive and of this kind."""
        thing = self._things.get(handle)
        if not isinstance(thing, kind):
            raise Failure(code, f"{handle:#x} is no {kind.__name__.lower()} (any more)")
        return thing

    def remove(self, handle: int, kind: type[Thing], code: int = codes.RT_PARAM_INVALID) -> Thing:
        thing = self.get(handle, kind, code)
        del self._things[handle]
        self.version += 1
        return thing

    def find(self, thing: Any) -> int:
        """The handle of a thing, 0 when it has none."""
        return next((handle for handle, known in self._things.items() if known is thing), 0)

    def count(self, kind: type[Thing]) -> int:
        return sum(isinstance(thing, kind) for thing in self._things.values())

    def all(self, kind: type[Thing]) -> list[Thing]:
        return [thing for thing in self._things.values() if isinstance(thing, kind)]
