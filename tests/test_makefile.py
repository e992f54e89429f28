"""The commands of a fresh clone: which Python is chosen, what is made, what is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"
MINOR = sys.version_info[1]

# Answers as a Python of one version would, to the few command lines the scripts use.
FAKE_PYTHON = """#!/bin/sh
[ -z "${{PYTHONPATH-}}${{PYTHONHOME-}}" ] || exit 7
case "$1 $2 $3" in
"-E -c "*) [ -z "$4" ] || [ "$4" = {minor} ] ;;
"-E -m venv") mkdir -p "$4/bin" && : >"$4/pyvenv.cfg" && cp "$0" "$4/bin/python" ;;
"-E -V ") echo "Python 3.{minor}.0" ;;
"-c  ") ;;
"-m pip install") echo "$0 $*" >>"$PIP_LOG" ;;
*) exit 9 ;;
esac
"""
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n"


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def run(
    *command: str | Path, path: str = os.environ["PATH"], cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command],
        env={"PATH": path, "HOME": "/nonexistent", "SYSTEM_BIN": "", **environ},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- which Python -----------------------------------------------------------------------------


def test_the_newest_python_that_runs_is_chosen(tmp_path: Path) -> None:
    """A name that does not run, as a version manager leaves them, is passed over."""
    program(tmp_path / "shims", "python3.13", BROKEN_SHIM.format(name="python3.13"))
    program(tmp_path / "shims", "python3.10", FAKE_PYTHON.format(minor=10))
    newest = program(tmp_path / "later", "python3.12", FAKE_PYTHON.format(minor=12))
    path = f"{tmp_path}/shims:{tmp_path}/later"
    leaked = {"PYTHONPATH": "/usr/local/Ascend", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/y"}

    found = run(TOOLS / "find_python.sh", path=path, **leaked)

    assert (found.returncode, found.stdout.strip()) == (0, str(newest)), found.stderr


def test_system_folders_are_searched_after_path(tmp_path: Path) -> None:
    """A newer Python outside PATH, in /usr/bin, is found; of two alike the one on PATH wins."""
    program(tmp_path / "first", "python3.11", FAKE_PYTHON.format(minor=11))
    program(tmp_path / "system", "python3.11", FAKE_PYTHON.format(minor=11))
    system = str(tmp_path / "system")
    path = str(tmp_path / "first")
    assert run(TOOLS / "find_python.sh", path=path, SYSTEM_BIN=system).stdout.startswith(path)
    newer = program(tmp_path / "system", "python3.13", FAKE_PYTHON.format(minor=13))
    found = run(TOOLS / "find_python.sh", path=path, SYSTEM_BIN=system)
    assert found.stdout.strip() == str(newer)


def test_a_real_interpreter_passes_the_check_and_a_wrong_name_does_not(tmp_path: Path) -> None:
    """The version decides, not the file's name; an old conda in front is passed over."""
    old = f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.exit(1)"\n'
    program(tmp_path / "conda", "python3", old)
    wrapper = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    real = program(tmp_path, "python3", wrapper)
    program(tmp_path, f"python3.{MINOR - 1 if MINOR > 10 else MINOR + 1}", wrapper)
    found = run(TOOLS / "find_python.sh", path=f"{tmp_path}/conda:{tmp_path}")
    assert found.stdout.strip() == str(real)


def test_without_a_python_the_package_to_install_is_named(tmp_path: Path) -> None:
    """One line says what to install; nothing is printed that could be taken for a path."""
    found = run(TOOLS / "find_python.sh", path=str(tmp_path))
    assert found.returncode == 1
    assert found.stdout == ""
    assert "apt-get install python3-venv" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_python_named_by_hand_is_tried_too(tmp_path: Path) -> None:
    """PYTHON= takes a path or a name, and one that does not work is refused by name."""
    good = program(tmp_path, "my-python", FAKE_PYTHON.format(minor=12))
    assert run(TOOLS / "find_python.sh", good, path="").stdout.strip() == str(good)
    assert run(TOOLS / "find_python.sh", "my-python", path=str(tmp_path)).returncode == 0
    bad = program(tmp_path, "bad", BROKEN_SHIM.format(name="bad"))
    refused = run(TOOLS / "find_python.sh", bad, path="")
    assert refused.returncode == 1
    assert f"PYTHON={bad}" in refused.stderr


def test_one_version_is_found_among_the_installed_ones(tmp_path: Path) -> None:
    """A version asked for by number is found in ~/.pyenv/versions when no shim runs."""
    program(tmp_path / "shims", "python3.10", BROKEN_SHIM.format(name="python3.10"))
    versions = tmp_path / ".pyenv" / "versions"
    real = program(versions / "3.10.13" / "bin", "python", FAKE_PYTHON.format(minor=10))
    path = str(tmp_path / "shims")
    found = run(TOOLS / "find_python.sh", "3.10", path=path, HOME=str(tmp_path))
    assert found.stdout.strip() == str(real)
    assert run(TOOLS / "find_python.sh", "3.13", path=path, HOME=str(tmp_path)).returncode == 1


# --- the environment --------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    os.utime(folder / "pyproject.toml", (1, 1))
    return folder


def make_venv(project: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run venv.sh; its result and the pip calls so far."""
    log = project / "pip.log"
    path = f"{project.parent}/bin:{os.environ['PATH']}"
    result = run(TOOLS / "venv.sh", *arguments, path=path, cwd=project, PIP_LOG=str(log))
    return result, log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def test_an_environment_is_made_once(project: Path) -> None:
    """The second call does nothing and says nothing; a changed pyproject.toml installs again."""
    python = program(project.parent / "bin", "python3.13", FAKE_PYTHON.format(minor=13))
    first, calls = make_venv(project, ".venv", ".[dev]")
    assert first.returncode == 0, first.stderr
    assert str(python) in first.stdout
    assert [call.split(" -e ")[1] for call in calls] == [".[dev]"]

    second, calls = make_venv(project, ".venv", ".[dev]")
    assert (second.returncode, second.stdout, len(calls)) == (0, "", 1)

    os.utime(project / "pyproject.toml")
    os.utime(project / ".venv" / ".edged-installed", (2, 2))
    third, calls = make_venv(project, ".venv", ".[dev]")
    assert (third.returncode, len(calls)) == (0, 2)


def test_another_python_rebuilds_the_environment(project: Path) -> None:
    """PYTHON= that differs from the one before starts anew; nothing of the old one stays."""
    program(project.parent / "bin", "python3.13", FAKE_PYTHON.format(minor=13))
    other = program(project.parent / "bin", "python3.11", FAKE_PYTHON.format(minor=11))
    make_venv(project, ".venv", ".")
    (project / ".venv" / "left-over").touch()
    result, calls = make_venv(project, ".venv", ".", str(other))
    assert result.returncode == 0, result.stderr
    assert str(other) in result.stdout
    assert len(calls) == 2
    assert not (project / ".venv" / "left-over").exists()


def test_an_environment_of_a_copied_checkout_is_made_anew(project: Path) -> None:
    """The copy's scripts would run the original's Python and code."""
    program(project.parent / "bin", "python3.13", FAKE_PYTHON.format(minor=13))
    make_venv(project, ".venv", ".")
    copy = project.parent / "copy"
    shutil.copytree(project, copy, copy_function=shutil.copy2, symlinks=True)
    (copy / ".venv" / "left-over").touch()
    result, calls = make_venv(copy, ".venv", ".")
    assert result.returncode == 0, result.stderr
    assert len(calls) == 2
    assert not (copy / ".venv" / "left-over").exists()


def test_a_folder_that_is_no_environment_is_left_alone(project: Path) -> None:
    """VENV= that names somebody's folder is refused, not deleted."""
    program(project.parent / "bin", "python3.13", FAKE_PYTHON.format(minor=13))
    (project / "precious").mkdir()
    (project / "precious" / "work").touch()
    result, calls = make_venv(project, "precious", ".")
    assert result.returncode == 1
    assert "precious" in result.stderr
    assert (project / "precious" / "work").exists()
    assert calls == []


# --- Debian packages --------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH with the shell's own tools and none of the programs the tests need."""
    for name in ("mktemp", "rm", "cat"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def test_without_root_one_line_says_what_to_install(machine: Path) -> None:
    """The exact command is printed, and the tests that can run still do."""
    program(machine, "id", "#!/bin/sh\necho 1000\n")
    result = run(TOOLS / "test_packages.sh", path=str(machine))
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert re.search(r"sudo apt-get install -y .*mosquitto-clients systemd", result.stdout)


def test_as_root_packages_are_installed_and_lists_updated_only_if_needed(machine: Path) -> None:
    """apt-get update runs only after an install that found nothing."""
    program(machine, "id", "#!/bin/sh\necho 0\n")
    log, ok = machine / "log", machine / "ok"
    apt = f'#!/bin/sh\necho "$1" >>"{log}"\n[ "$1" = update ] || [ -e "{ok}" ] || {{\n'
    apt += f': >"{ok}"; exit 100; }}\n'
    program(machine, "apt-get", apt)
    assert run(TOOLS / "test_packages.sh", path=str(machine)).returncode == 0
    assert log.read_text(encoding="utf-8").split() == ["install", "update", "install"]
    log.unlink()
    assert run(TOOLS / "test_packages.sh", path=str(machine)).returncode == 0
    assert log.read_text(encoding="utf-8").split() == ["install"]


def test_an_install_that_fails_is_shown(machine: Path) -> None:
    """apt's own words reach the user when it fails."""
    program(machine, "id", "#!/bin/sh\necho 0\n")
    program(machine, "apt-get", "#!/bin/sh\necho no network today\nexit 100\n")
    result = run(TOOLS / "test_packages.sh", path=str(machine))
    assert result.returncode == 1
    assert "no network today" in result.stderr


# --- make itself ------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    """`make` alone explains itself."""
    shown = run("make")
    assert shown.returncode == 0, shown.stderr
    for target in ("help", "setup", "run", "test", "check", "fix", "clean"):
        assert re.search(rf"^  {target}\t\S", shown.stdout, flags=re.M), target


def test_leaked_variables_do_not_reach_the_recipes(tmp_path: Path) -> None:
    """PYTHONPATH and its like of a vendor image end at make's door."""
    fragment = tmp_path / "show.mk"
    fragment.write_text(f"include {ROOT}/Makefile\nshow:\n\t@env\n", encoding="utf-8")
    leaked = {"PYTHONPATH": "/usr/local/Ascend", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/y"}
    shown = run("make", "-f", fragment, "show", **leaked)
    assert shown.returncode == 0, shown.stderr
    assert not any(line.split("=")[0] in leaked for line in shown.stdout.splitlines())


def test_ci_starts_from_any_folder(tmp_path: Path) -> None:
    """A relative path to .ci/run, from somewhere else, works: it gets as far as `make check`."""
    program(tmp_path / "repo" / ".ci", "run", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    program(tmp_path / "repo" / "tools", "test_packages.sh", "#!/bin/sh\n")
    program(tmp_path / "repo" / "tools", "find_python.sh", "#!/bin/sh\n")
    make = program(tmp_path / "bin", "make", '#!/bin/sh\necho "make $* in $PWD"; exit 3\n')
    started = run("repo/.ci/run", path=f"{make.parent}:{os.environ['PATH']}", cwd=tmp_path)
    assert started.returncode == 3, started.stderr
    assert started.stdout == f"make check in {tmp_path / 'repo'}\n"


@pytest.mark.parametrize("script", ["tools/find_python.sh", "tools/venv.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    """Every script a command calls can be started and has no syntax error."""
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert run("bash", "-n", path).returncode == 0
