"""The command line as users type it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def edged(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edged", *words], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_export_takes_its_own_options(tmp_path: Path) -> None:
    """`edged export --model X --out Y`, as every error message tells it, reaches the exporter."""
    done = edged("export", "--model", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "none.gguf does not exist" in done.stderr


@pytest.mark.parametrize(("verb", "option"), [("export", "--dtype"), ("twin", "--twin")])
def test_a_verb_with_its_own_options_explains_them(verb: str, option: str) -> None:
    """--help behind such a verb is that verb's help."""
    shown = edged(verb, "--help")
    assert shown.returncode == 0
    assert option in shown.stdout


def test_an_error_keeps_its_code_when_nobody_reads_it() -> None:
    """A full disk behind stderr does not turn 78 into something systemd restarts."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "edged", "run", "--set", "http.port=x"]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 78


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("fly",), 2),
        (("run", "--config"), 2),
        (("run", "--config", "/nowhere/edged.toml"), 78),
        (("run", "--set", "model.path=~no-such-user/x"), 78),
        (("check-config", "--set", "http.port=1"), 0),
        (("check-config", "--set", "http.port=x"), 78),
        (("check-config", "--set", "http.api_keys_file=/nowhere/keys"), 78),
        (("check-config", "--set", "mqtt.base=#"), 78),
        (("check-config", "--set", "mqtt.reply_allow=['a/#/b']"), 78),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int) -> None:
    """2 for a wrong command line, 78 for a configuration that cannot be used."""
    done = edged(*words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
