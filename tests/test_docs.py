"""The documents: commands that exist, links that lead somewhere, promises that have a test."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from edged import cli, config

ROOT = Path(__file__).parent.parent
BEHAVIOUR = ROOT / "docs" / "behaviour.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def shell_lines(text: str) -> list[str]:
    """Commands after `$ ` in code blocks, continuation lines joined."""
    joined = text.replace("\\\n", " ")
    return [line[2:].partition("#")[0].strip() for line in joined.splitlines() if line[:2] == "$ "]


def promises() -> list[str]:
    """The list items of docs/behaviour.md, each on one line."""
    items: list[str] = []
    for line in text_of(BEHAVIOUR).splitlines():
        if line.startswith("- "):
            items.append(line[2:].strip())
        elif items and line.startswith("  "):
            items[-1] += " " + line.strip()
    return items


def functions_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(text_of(path)))
    return {node.name for node in nodes if isinstance(node, functions)}


def test_the_readme_names_commands_that_exist() -> None:
    """Every `make` command of the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), flags=re.M))
    named = {
        line.split()[1] for line in shell_lines(text_of(ROOT / "README.md")) if "make " in line
    }
    assert {"run", "test"} <= named
    assert named <= targets


def test_every_edged_verb_in_the_documents_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """`edged VERB` in any page is a verb of the command line."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    known = set(re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, flags=re.M))
    for page in PAGES:
        for verb in re.findall(r"`edged ([a-z-]+)", text_of(page)):
            assert verb in known, f"{page.name}: edged {verb}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    """No file in configs/ is stale."""
    config.load(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    """A relative link in a page points to something in the repository."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_promise_names_a_test_that_exists() -> None:
    """Each line of docs/behaviour.md ends with the tests that hold it."""
    assert promises()
    for promise in promises():
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", promise)
        assert named, f"no test is named: {promise}"
        for file, function in named:
            assert (ROOT / file).exists(), promise
            assert function in functions_in(ROOT / file), f"{file} has no {function}: {promise}"


def test_every_test_says_what_it_promises() -> None:
    """Every test function of the suite has a docstring."""
    silent = [
        f"{path.name}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_the_licence_is_the_one_declared() -> None:
    """LICENSE holds the full text of the licence that pyproject.toml names."""
    assert 'license = "Apache-2.0"' in text_of(ROOT / "pyproject.toml")
    licence = text_of(ROOT / "LICENSE")
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
