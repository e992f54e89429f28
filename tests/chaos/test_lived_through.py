"""One daemon, hurt again and again: nothing is lost, and it heals by itself each time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.cases import CASES, LONG, SMOKE
from chaos.lab import Home, Lab, lab

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]


class Served:
    """The daemon of this module; after a case that failed, another one."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._stack = contextlib.AsyncExitStack()
        self._lab: Lab | None = None

    async def lab(self) -> Lab:
        if self._lab is None:
            self._lab = await self._stack.enter_async_context(lab(self._home))
        return self._lab

    async def close(self) -> None:
        self._lab = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(chaos_home: Home) -> AsyncIterator[Served]:
    made = Served(chaos_home)
    try:
        yield made
    finally:
        await made.close()


def _parameters() -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else [], id=name)
        for name in (*CASES, *LONG)
    ]


@pytest.mark.parametrize("name", _parameters())
async def test_whatever_breaks_every_answer_is_whole(served: Served, name: str) -> None:
    """Every stream ends once, with the right engines and not one character lost; no slot, file or
    process is left over; the next request is served by the NPU; the mode is normal again."""
    case = (CASES | LONG)[name]
    try:
        await case(await served.lab(), random.Random(name))
    except BaseException:
        await served.close()
        raise
