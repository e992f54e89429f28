"""Where exports are cached, and what becomes of one that is cut off.

The exporter here is a script that takes its time; the real one has tests of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from edged import models
from edged.errors import ConfigError

EXPORTER = """#!/bin/sh
# -m edged.export --model SOURCE --out TARGET ...
echo $$ >>"{folder}/pids"
half="$(dirname "$6")/.$(basename "$6").half"
mkdir "$half"
while [ ! -e "{folder}/go" ]; do sleep 0.05; done
{end}
echo '{{}}' >"$half/model.json"
mv "$half" "$6"
"""
PREPARE = """
import sys
from pathlib import Path
sys.executable = {exporter!r}
from edged import models
print(models.ensure_exported(Path({source!r}), Path({state!r}), "int8", print), flush=True)
"""
RUN = """
import sys
sys.executable = {exporter!r}
from edged import cli
sets = ("http.port=0", "http.unix_socket=", "model.path={source}", "state_dir={state}")
sys.exit(cli.main(["run", *(word for item in sets for word in ("--set", item))]))
"""


class Place:
    """A source, a state folder and an exporter that waits for the file `go`."""

    def __init__(self, folder: Path, end: str = "") -> None:
        self.folder = folder
        self.source = folder / "model.gguf"
        self.source.write_bytes(b"weights")
        self.state = folder / "state"
        self.exporter = folder / "exporter"
        self.exporter.write_text(EXPORTER.format(folder=folder, end=end), encoding="utf-8")
        self.exporter.chmod(0o755)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str) -> subprocess.Popen[str]:
        names = {"exporter": str(self.exporter), "source": str(self.source)}
        code = code.format(**names, state=str(self.state))
        made = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(made)
        return made

    def exports(self) -> list[int]:
        """Process ids of the exporters that were started."""
        listed = self.folder / "pids"
        return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []

    def go(self) -> None:
        (self.folder / "go").touch()

    def left(self) -> list[str]:
        exported = self.state / "models" / "exported"
        return sorted(path.name for path in exported.iterdir() if not path.name.endswith(".lock"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.go()
    for process in made.started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert condition()


def test_two_that_start_together_export_once(place: Place) -> None:
    """The second waits, says so, and takes what the first has made."""
    first = place.start(PREPARE)
    until(lambda: len(place.exports()) == 1)
    second = place.start(PREPARE)
    assert second.stdout is not None
    assert "waiting for another process" in second.stdout.readline()
    place.go()

    assert (
        first.communicate(timeout=30)[0].splitlines()[-1]
        == (second.communicate(timeout=30)[0].splitlines()[-1])
    )
    assert len(place.exports()) == 1


def test_a_start_after_a_kill_takes_over_the_export_under_way(place: Place) -> None:
    """kill -9 of the daemon in mid-export: the export goes on, and the next start waits for it."""
    first = place.start(PREPARE)
    until(lambda: len(place.exports()) == 1)
    first.kill()
    second = place.start(PREPARE)
    assert second.stdout is not None
    assert "waiting for another process" in second.stdout.readline()
    place.go()

    assert place.state.name in second.communicate(timeout=30)[0]
    assert len(place.exports()) == 1
    assert len(place.left()) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_export_is_a_clean_stop(place: Place, signum: int) -> None:
    """`edged run` ends with 0, the exporter with it, and nothing half-made stays."""
    daemon = place.start(RUN)
    until(lambda: bool(place.exports() and place.left()))
    daemon.send_signal(signum)

    assert daemon.wait(20) == 0
    until(lambda: not running(place.exports()[0]))
    assert place.left() == []


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_exporter_that_is_killed_is_told_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to look at: memory, or the exporter's own last line; a model that is
    refused is a matter of configuration (exit 78), a full disk is worth another try (75)."""
    for number, (end, kind, said) in enumerate(
        (
            ("kill -9 $$", models.ModelError, "SIGKILL.*memory"),
            ("echo 'edged export: full' >&2; exit 3", models.ModelError, "failed: full$"),
            ("echo 'edged export: no' >&2; exit 2", ConfigError, "cannot be used: no$"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder, end)
        place.go()
        monkeypatch.setattr(sys, "executable", str(place.exporter))
        with pytest.raises(kind, match=said):
            models.ensure_exported(place.source, place.state, "int8")


def test_what_is_exported_is_used_without_a_write(tmp_path: Path) -> None:
    """A file system that went read-only, or full, does not keep the daemon from starting."""
    place = Place(tmp_path)
    target = models.model_dir_for(place.source, place.state, "int8")
    target.mkdir(parents=True)
    (target / models.MANIFEST_FILE).touch()
    before = sorted(place.state.rglob("*"))

    assert models.ensure_exported(place.source, place.state, "int8") == target
    assert sorted(place.state.rglob("*")) == before


def test_a_changed_source_is_another_export(tmp_path: Path) -> None:
    """Place, size, time and dtype name the cache: a model file that was replaced is seen."""
    place = Place(tmp_path)
    first = models.model_dir_for(place.source, place.state, "int8")
    assert models.model_dir_for(place.source, place.state, "fp32") != first
    os.utime(place.source, (1, 1))
    assert models.model_dir_for(place.source, place.state, "int8") != first


def test_a_missing_source_says_the_next_step(tmp_path: Path) -> None:
    """No model is an error in words, not a trace."""
    with pytest.raises(models.ModelError, match="edged models fetch demo"):
        models.ensure_exported(tmp_path / "none.gguf", tmp_path, "int8")
    (tmp_path / "file").touch()
    with pytest.raises(models.ModelError, match="cannot read model"):
        models.ensure_exported(tmp_path / "file" / "x.gguf", tmp_path, "int8")


def test_exports_of_older_exporters_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade what the old exporter made of the same name and form is removed; other
    forms, other names, newer ones and damaged folders stay."""
    place = Place(tmp_path)
    place.go()
    monkeypatch.setattr(sys, "executable", str(place.exporter))
    exported = models.model_dir_for(place.source, place.state, "int8").parent
    kept = {"model-fp32-cpu-0123456789": 1, "other-int8-cpu-0123456789": 1}
    kept |= {
        "model-int8-cpu-aaaaaaaaaa": models.EXPORTER_VERSION,
        "model-int8-cpu-bbbbbbbbbb": None,
    }
    for name, version in {**kept, "model-int8-cpu-0123456789": 1}.items():
        (exported / name).mkdir(parents=True)
        text = "{" if version is None else f'{{"exporter_version": {version}}}'
        (exported / name / models.MANIFEST_FILE).write_text(text, encoding="utf-8")

    target = models.ensure_exported(place.source, place.state, "int8")
    assert place.left() == sorted([*kept, target.name])
