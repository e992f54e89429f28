"""The unit files, verified offline by systemd's own tools (no running systemd needed)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parent.parent / "systemd"
DROP_INS = sorted((UNITS / "edged.service.d").glob("*.conf"))
VENV_PYTHON = "/opt/edged/venv/bin/python"
TOOLS = ("systemd-analyze", "systemd-sysusers", "systemd-tmpfiles")
NEWEST_KEYS = {"50-systemd-254.conf": 254}  # drop-in -> the systemd that knows its keys


MISSING = [tool for tool in TOOLS if not shutil.which(tool)]

# In CI a missing tool is a failure: the promise must not go unchecked there.
pytestmark = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("CI"),
    reason=f"not installed: {', '.join(MISSING)} (Debian package systemd)",
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60)


def systemd_version() -> int:
    match = re.search(r"systemd (\d+)", run("systemd-analyze", "--version").stdout)
    assert match is not None
    return int(match[1])


def unit_with(folder: Path, *drop_ins: Path) -> Path:
    """A copy whose program exists on this machine, with the drop-ins beside it."""
    text = (UNITS / "edged.service").read_text(encoding="utf-8")
    text, count = re.subn(r"^ExecStart=\S+", "ExecStart=/usr/bin/true", text, flags=re.M)
    assert count == 1
    unit = folder / "edged.service"
    unit.write_text(text, encoding="utf-8")
    for drop_in in drop_ins:
        (folder / "edged.service.d").mkdir(exist_ok=True)
        shutil.copy(drop_in, folder / "edged.service.d")
    return unit


def verify(unit: Path) -> subprocess.CompletedProcess[str]:
    return run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit)


def exposure(unit: Path) -> subprocess.CompletedProcess[str]:
    return run("systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=25", unit)


def test_the_unit_is_valid_and_sandboxed(tmp_path: Path) -> None:
    """systemd accepts every line of the unit, and its exposure is at most 2.5."""
    unit = unit_with(tmp_path)
    checked, exposed = verify(unit), exposure(unit)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert exposed.returncode == 0, exposed.stdout


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda path: path.name)
def test_each_drop_in_is_valid_and_sandboxed(tmp_path: Path, drop_in: Path) -> None:
    """systemd accepts the unit with each drop-in; only a too old one may warn of new keys."""
    unit = unit_with(tmp_path, drop_in)
    checked, exposed = verify(unit), exposure(unit)
    assert exposed.returncode == 0, exposed.stdout
    if systemd_version() >= NEWEST_KEYS.get(drop_in.name, 249):
        assert (checked.returncode, checked.stderr) == (0, "")
    else:
        unknown = set(re.findall(r"Unknown key (?:name )?'(\w+)'", checked.stderr))
        set_there = set(re.findall(r"^(\w+)=", drop_in.read_text(encoding="utf-8"), flags=re.M))
        assert unknown == set_there
        assert all("Unknown key" in line for line in checked.stderr.splitlines())


def levers_units(folder: Path, *drop_ins: str) -> list[Path]:
    """The helper's units beside each other, their program one that exists on this machine."""
    for source in UNITS.glob("edged-levers*.s*"):
        if source.is_file():
            text = source.read_text(encoding="utf-8")
            (folder / source.name).write_text(text.replace(VENV_PYTHON, "/usr/bin/true"))
    for name in drop_ins:
        for unit in ("edged-levers", "edged-levers-restore"):
            (folder / f"{unit}.service.d").mkdir(exist_ok=True)
            shutil.copy(UNITS / "edged-levers.service.d" / name, folder / f"{unit}.service.d")
    return [folder / f"edged-levers{end}" for end in (".socket", ".service", "-restore.service")]


@pytest.mark.parametrize("drop_ins", [(), ("10-ascend.conf",)], ids=["plain", "ascend"])
def test_the_helpers_units_are_valid_and_sandboxed(
    tmp_path: Path, drop_ins: tuple[str, ...]
) -> None:
    """systemd accepts every line of the root helper's units; their exposure is at most 2.5."""
    units = levers_units(tmp_path, *drop_ins)
    checked = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    for unit in units[1:]:
        exposed = exposure(unit)
        assert exposed.returncode == 0, exposed.stdout


def test_the_helpers_units_start_what_the_package_has() -> None:
    """Their command lines are understood: with nothing left to restore, --restore is done."""
    for name in ("edged-levers.service", "edged-levers-restore.service"):
        text = (UNITS / name).read_text(encoding="utf-8")
        commands = re.findall(rf"^Exec\w+={VENV_PYTHON} (.*)$", text, flags=re.M)
        restores = [shlex.split(words) for words in commands if "--restore" in words]
        assert len(restores) == 1
        done = run(sys.executable, *restores[0])
        assert (done.returncode, done.stderr) == (0, "")


def test_both_of_the_helpers_services_have_the_same_sandbox() -> None:
    """What is restored at boot is restored under the same restrictions."""
    keys = re.compile(
        r"^(?:Protect|Private|Restrict|System|Device|ReadWrite|NoNew|Cap|IP|Memory|Lock|Proc)\w+=.*$",
        flags=re.M,
    )
    names = ("edged-levers.service", "edged-levers-restore.service")
    first, second = (set(keys.findall((UNITS / n).read_text(encoding="utf-8"))) for n in names)
    assert first == second


def test_the_check_itself_can_fail(tmp_path: Path) -> None:
    """A misspelt key and a bad value are refused, so that a pass means something."""
    unit = unit_with(tmp_path)
    good = unit.read_text(encoding="utf-8")
    unit.write_text(good.replace("KillMode=", "KillMod="), encoding="utf-8")
    assert verify(unit).returncode != 0
    unit.write_text(good.replace("WatchdogSec=30s", "WatchdogSec=banana"), encoding="utf-8")
    assert verify(unit).returncode != 0


def test_the_unit_starts_the_command_the_package_has(tmp_path: Path) -> None:
    """ExecStart's arguments are understood, and a bad config ends with a status not restarted."""
    text = (UNITS / "edged.service").read_text(encoding="utf-8")
    program, *arguments = shlex.split(re.findall(r"^ExecStart=(.*)$", text, flags=re.M)[0])
    assert Path(program).name == "edged"
    bad = tmp_path / "edged.toml"
    bad.write_text("prot = 1", encoding="utf-8")
    arguments = [str(bad) if a == "/etc/edged/edged.toml" else a for a in arguments]
    ended = run(sys.executable, "-m", "edged", *arguments)
    assert "prot" in ended.stderr
    not_restarted = re.findall(r"^RestartPreventExitStatus=(.*)$", text, flags=re.M)[0].split()
    assert str(ended.returncode) in not_restarted


def test_the_accounts_and_folders_can_be_made(tmp_path: Path) -> None:
    """sysusers makes the user edged (and no driver group), tmpfiles a folder for secrets."""
    (tmp_path / "etc").mkdir()
    users = run("systemd-sysusers", f"--root={tmp_path}", UNITS / "edged.sysusers.conf")
    assert users.returncode == 0, users.stderr
    assert "edged:" in (tmp_path / "etc" / "passwd").read_text(encoding="utf-8")
    assert "HwHiAiUser" not in (tmp_path / "etc" / "group").read_text(encoding="utf-8")
    if os.geteuid() != 0:
        pytest.skip("giving folders to a group needs root")
    made = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", UNITS / "edged.tmpfiles.conf")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "etc/edged/credentials").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("board", ["310b", "310p"])
def test_device_lists_fit_the_board(board: str) -> None:
    """310B has no devmm_svm and no hisi_hdc, 310P has no svm0; both say where a fact is from."""
    text = (UNITS / f"edged.service.d/10-ascend-{board}.conf").read_text(encoding="utf-8")
    nodes = set(re.findall(r"^DeviceAllow=/dev/(\S+) rw$", text, flags=re.M))
    assert {"davinci0", "davinci_manager"} <= nodes
    assert ({"devmm_svm", "hisi_hdc"} <= nodes) == (board == "310p")
    assert ("svm0" in nodes) == (board == "310b")
    for line in re.findall(r"^DeviceAllow=.*$", text, flags=re.M):
        assert re.search("source|assumed", comment_above(text, line), re.I), line


def comment_above(text: str, line: str) -> str:
    """The comment block nearest above a line."""
    above = text[: text.index(line)].splitlines()
    while above and not above[-1].startswith("#"):
        above.pop()
    block: list[str] = []
    while above and above[-1].startswith("#"):
        block.insert(0, above.pop())
    return " ".join(block)
