"""One daemon, hurt again and again: nothing is lost, and it heals by itself each time."""

from __future__ import annotations

import random

import pytest
from chaos.cases import CASES, SMOKE
from chaos.lab import Home, lab

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def _parameters() -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else [], id=name)
        for name in CASES
    ]


@pytest.mark.parametrize("name", _parameters())
async def test_whatever_breaks_every_answer_is_whole(chaos_home: Home, name: str) -> None:
    """Every stream ends once, with the right engines and not one character lost; no slot, file or
    process is left over; the next request is served by the NPU; the mode is normal again."""
    async with lab(chaos_home) as made:
        await CASES[name](made, random.Random(name))
