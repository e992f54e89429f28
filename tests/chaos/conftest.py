"""The model of the chaos suite, made once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.lab import Home, home


@pytest.fixture(scope="session")
def chaos_home() -> Iterator[Home]:
    with home() as made:
        yield made
