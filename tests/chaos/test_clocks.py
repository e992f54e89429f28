"""Clocks that jump: no part of the daemon that decides anything may ask what time of day it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import edged

pytestmark = [pytest.mark.chaos, pytest.mark.smoke]

ROOT = Path(edged.__file__).parent
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"} | {
    f"datetime.{name}" for name in ("now", "utcnow", "today")
}
NAMES = {name.split(".")[1] for name in WALL}
# What is told to people, or asked by them, in the time of day.
MAY = {
    "ingress/http/generate.py": "`created` of OpenAI's objects",
    "ingress/catalog.py": "`created` of OpenAI's list of models",
    "ingress/mqtt/state.py": "the time of a state",
    "text/template.py": "a chat template may ask for today's date",
    "text/chat.py": "the same",
    "text/model.py": "the same",
    "thermal.py": "the fan's quiet hours",
    "engine/upstream/refusal.py": "a Retry-After that is a date",
    "reboot.py": "a budget that has to outlast the boot",
}


def uses(path: Path) -> list[str]:
    """The wall-clock calls of a module, as "line: name"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            name = ast.unparse(node)
            if ".".join(name.split(".")[-2:]) in WALL:
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [f"{node.lineno}: from {name}" for name in sorted(names & WALL)]
    return found


def test_only_what_people_read_asks_the_wall_clock() -> None:
    """A clock that jumps moves no deadline, no back-off and no time-out: modules that read the
    time of day are the few named here, each for a reason."""
    found = {
        str(path.relative_to(ROOT)): used
        for path in sorted(ROOT.rglob("*.py"))
        if (used := uses(path))
    }
    assert found.keys() == MAY.keys(), found
