"""How a call of the library behaves: positional arguments, plain values, codes, no exceptions.

The decorators turn functions that raise Failure into methods of the simulated surface.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from edged.twin.acl import codes
from edged.twin.acl.codes import Failure
from edged.twin.acl.process import CONTEXT, DEVICE, INITIALISED, NOTHING, Process

__all__ = ["CONTEXT", "DEVICE", "INITIALISED", "NOTHING", "Surface", "action", "bare", "producer"]

Body = Callable[..., Any]


class Surface:
    """Base of the namespaces; without_init: the code its calls give before acl.init."""

    without_init = codes.CONTEXT_NULL

    def __init__(self, process: Process) -> None:
        self._process = process


def action(spec: str, needs: int = DEVICE) -> Callable[[Body], Body]:
    """-> ret"""
    return _decorator(spec, needs, lambda code, _: code)


def producer(spec: str, *failed: Any, needs: int = DEVICE) -> Callable[[Body], Body]:
    """-> (value, ..., ret); `failed`: the values when ret is not 0"""

    def shape(code: int, value: Any) -> Any:
        if code:
            return (*failed, code)
        return (*value, code) if len(failed) > 1 else (value, code)

    return _decorator(spec, needs, shape)


def bare(spec: str, failed: Any, needs: int = NOTHING) -> Callable[[Body], Body]:
    """-> value, without a ret"""
    return _decorator(spec, needs, lambda code, value: failed if code else value)


def _decorator(spec: str, needs: int, shape: Callable[[int, Any], Any]) -> Callable[[Body], Body]:
    required, _, optional = spec.partition("|")
    least, kinds = len(required), required + optional

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def call(self: Surface, /, *args: Any) -> Any:
            if not least <= len(args) <= len(kinds):
                raise TypeError(
                    f"{body.__name__}() takes {least} to {len(kinds)} arguments, got {len(args)}"
                )
            values = [_converted(kind, a) for kind, a in zip(kinds, args, strict=False)]
            process = self._process
            try:
                if needs:
                    process.require(needs, self.without_init)
                return shape(codes.OK, body(self, *values))
            except Failure as failure:
                process.note(body.__name__, failure)
                return shape(failure.code, None)

        return call

    return decorate


def _converted(kind: str, value: Any) -> Any:
    """As PyArg_ParseTuple does: k unsigned 64-bit without overflow check, i a C int, s a str."""
    if kind == "k":
        return operator.index(value) & 0xFFFF_FFFF_FFFF_FFFF
    if kind == "i":
        number = operator.index(value)
        if not -(1 << 31) <= number < 1 << 31:
            raise OverflowError("signed integer is out of the range of a C int")
        return number
    if kind == "s":
        if not isinstance(value, str):
            raise TypeError(f"argument must be str, not {type(value).__name__}")
        return value
    if kind == "f":
        return float(value)
    return value
