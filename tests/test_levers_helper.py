"""The root helper as a real process: what it changes is always put back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes_levers import Asker, Board, clock_tool, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edged.errors import ConfigError
from edged.guard.levers.knobs import clamped, pwm_fans
from edged.guard.levers.root import LONGEST_LINE_BYTES, Helper
from edged.guard.levers.root_config import read
from edged.guard.levers.saved import Saved

FAN = "pwmfan/pwm1"
BEFORE = (102, 2)  # 40 %, automatic


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_a_set_is_read_back_and_undone_by_restore(board: Board) -> None:
    """The answer is the duty that was read back; restore brings duty and automatic mode back."""
    with board.helper(), Asker(board.socket) as asker:
        levers = asker.ask(verb="list")["levers"]
        assert levers == [{"name": FAN, "kind": "fan", "values": [0.4, 1.0]}]
        assert asker.ask(verb="set", name=FAN, value=0.7)["value"] == pytest.approx(0.7, abs=0.01)
        assert board.fan() == (178, 1)
        assert asker.ask(verb="get", name=FAN)["value"] == pytest.approx(0.7, abs=0.01)
        assert asker.ask(verb="restore") == {"ok": True}
        assert board.fan() == BEFORE
        assert not board.saved.exists()


@pytest.mark.parametrize(("asked", "target"), [(0, 0.4), (-3, 0.4), (7, 1.0), (1e308, 1.0)])
def test_values_are_clamped_and_the_answer_says_so(
    board: Board, asked: float, target: float
) -> None:
    """No client can stop a fan or overdrive it."""
    with board.helper(), Asker(board.socket) as asker:
        answer = asker.ask(verb="set", name=FAN, value=asked)
    assert (answer["target"], answer["value"]) == (target, pytest.approx(target, abs=0.01))


def test_a_client_killed_midway_leaves_nothing_changed(board: Board) -> None:
    """kill -9 of the client: the fan is as it was, and the record is gone."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        f"s.sendall(b'{json.dumps({'verb': 'set', 'name': FAN, 'value': 1})}\\n')\n"
        "print(s.recv(999).decode(), flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(board.socket)]
    with board.helper():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, **pipes) as client:  # type: ignore[call-overload]
            assert json.loads(client.stdout.readline())["ok"]
            assert board.fan() == (255, 1)
            client.kill()
        until(lambda: board.fan() == BEFORE and not board.saved.exists())
        with Asker(board.socket) as asker:  # and it serves the next one
            assert asker.ask(verb="hello")["program"] == "edged-levers"


def test_a_killed_helper_is_undone_by_restore(board: Board) -> None:
    """kill -9 of the helper: --restore, as at stop and at boot, puts everything back."""
    with board.helper() as helper, Asker(board.socket) as asker:
        assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        helper.kill()
        helper.wait(10)
    assert board.fan() == (255, 1)
    assert json.loads(board.saved.read_text()) == {FAN: {"pwm": 102, "enable": 2}}
    done = board.restore()
    assert (done.returncode, done.stderr) == (0, "")
    assert board.fan() == BEFORE
    assert not board.saved.exists()


def test_a_helper_started_anew_undoes_what_a_killed_one_left(board: Board) -> None:
    """Even without --restore in between, and under another hwmon number after a boot."""
    with board.helper() as helper, Asker(board.socket) as asker:
        assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        helper.kill()
        helper.wait(10)
    moved = board.hwmon.with_name("hwmon7")
    board.hwmon.rename(moved)
    board.hwmon = moved
    with board.helper():
        assert board.fan() == BEFORE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_helper_restores_first(board: Board, number: int) -> None:
    """SIGTERM in the middle of a conversation: everything is put back, the exit is a clean one."""
    with board.helper() as helper, Asker(board.socket) as asker:
        assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        helper.send_signal(number)
        assert helper.wait(20) == 0
        assert asker.said() == {}
    assert board.fan() == BEFORE


def test_a_stop_in_the_middle_of_a_move_is_undone(board: Board) -> None:
    """SIGTERM while a vendor's tool is at work: it ends first, then the clock goes back."""
    on_set = '[ $2 != 400 ] || { touch "$clock.began"; sleep 0.5; }; echo "$2" > "$clock"'
    tool = str(clock_tool(board.folder, on_set=on_set))
    board.configure(
        frequency_get=[tool, "get"],
        frequency_set=[tool, "set", "{mhz}"],
        frequencies_mhz=[400, 800],
    )
    with board.helper() as helper, Asker(board.socket) as asker:
        asker.send(b'{"verb": "set", "name": "command/clock", "value": 400}\n')
        until((board.folder / "mhz.began").exists)
        helper.terminate()
        assert helper.wait(20) == 0
    assert (board.folder / "mhz").read_text() == "800\n"
    assert not board.saved.exists()


def test_restore_leaves_a_working_helper_alone(board: Board) -> None:
    """--restore beside a helper at work is refused in words and changes nothing."""
    with board.helper(), Asker(board.socket) as asker:
        assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        done = board.restore()
        assert done.returncode == 1
        assert "another process" in done.stderr
        assert board.fan() == (255, 1)


def test_what_cannot_be_restored_is_told_and_kept(board: Board) -> None:
    """A fan that is gone stays on the record; the exit status and the words say so."""
    board.saved.parent.mkdir()
    board.saved.write_text('{"gone/pwm3": {"pwm": 1}}')
    done = board.restore()
    assert done.returncode == 1
    assert "gone/pwm3" in done.stderr
    assert board.saved.exists()


def test_a_second_client_is_refused_in_words(board: Board) -> None:
    """One program moves the levers at a time; the first one notices nothing."""
    with board.helper(), Asker(board.socket) as first:
        assert first.ask(verb="set", name=FAN, value=1)["ok"]
        with Asker(board.socket) as second:
            assert "another program" in second.ask(verb="set", name=FAN, value=0.5)["error"]
            assert second.said() == {}
        assert first.ask(verb="get", name=FAN)["value"] == 1.0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="edged-levers-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_stranger_is_refused_by_the_kernels_word(open_folder: Path) -> None:
    """A user that the file does not name is told so, even if the socket's mode lets it in."""
    board = Board(open_folder)
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "print(s.makefile().readline())\n"
    )
    with board.helper():
        board.socket.chmod(0o666)
        words = [sys.executable, "-c", code, str(board.socket)]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert "user 65534 may not move levers" in json.loads(said.stdout)["error"], said.stderr
    board.configure(user="nobody")
    with board.helper(), Asker(board.socket) as root:
        assert root.ask(verb="hello")["ok"]


# --- hostile input -------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


names = st.sampled_from([FAN, "../pwm1", "/etc/passwd", "", "pwmfan/pwm1\0", "pwmfan/pwm2"])
scalars = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | names
requests = st.dictionaries(
    st.sampled_from(["verb", "name", "value", "path", "get"]),
    st.sampled_from(["hello", "list", "get", "set", "restore", "flash"]) | scalars,
)
lines = st.binary(max_size=600) | requests.map(lambda r: json.dumps(r).encode())


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(lines, max_size=6))
def test_no_line_touches_anything_but_the_levers(sent: list[bytes]) -> None:
    """Whatever is sent: an answer, duties within bounds, no other file, and all of it undone."""
    with tempfile.TemporaryDirectory() as name:
        board = Board(Path(name))
        before = tree(board.folder)
        fans = pwm_fans(board.sysfs, 0.4)
        helper = Helper(fans, [], Saved(board.saved))
        board.saved.parent.mkdir()
        for line in sent:
            answer = helper.answer(line)
            assert isinstance(answer["ok"], bool)
            assert json.loads(json.dumps(answer, allow_nan=False)) is not None
            assert 102 <= board.fan()[0] <= 255
        mine = {str(board.hwmon / "pwm1"), str(board.hwmon / "pwm1_enable"), str(board.saved)}
        changed = {p for p, data in tree(board.folder).items() if before.get(p) != data}
        assert changed <= mine
        assert helper.restore() == []
        assert tree(board.folder) == before


def test_hostile_bytes_on_the_socket_end_in_words(board: Board) -> None:
    """Endless lines, deep nesting and noise: an answer each, or the end; the helper serves on."""
    with board.helper():
        for data in (b"x" * 100_000, b"y" * (LONGEST_LINE_BYTES + 1) + b"\n"):
            with Asker(board.socket) as asker:
                asker.send(data)
                assert "too long" in asker.said()["error"]
        with Asker(board.socket) as asker:
            for data in (b"[" * 500, b"\xff\x00", b"", b'"set"', b'{"verb":["set"]}'):
                asker.send(data + b"\n")
                assert asker.said()["ok"] is False
            assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        until(lambda: board.fan() == BEFORE)


def test_a_flood_is_slowed_and_loses_nothing(board: Board) -> None:
    """30 requests in one write are all answered, at the helper's own rate."""
    with board.helper(), Asker(board.socket) as asker:
        asker.send(b'{"verb":"hello"}\n' * 30)
        assert [asker.said()["ok"] for _ in range(30)] == [True] * 30


def test_what_was_there_is_on_the_disk_before_anything_moves(tmp_path: Path) -> None:
    """The record exists when the first write reaches the knob, and keeps the first original."""
    saved = Saved(tmp_path / "saved.json")
    seen: list[dict[str, Any]] = []

    class Watched:
        name, kind, values = "fan", "fan", (0.4, 1.0)
        place = 0.5

        def read(self) -> float:
            return self.place

        def write(self, value: float) -> None:
            seen.append(json.loads(saved.path.read_text()))
            self.place = value

        def original(self) -> dict[str, Any]:
            return {"place": self.place}

        def restore(self, original: dict[str, Any]) -> None:
            self.place = original["place"]

    knob = Watched()
    helper = Helper([knob], [], saved)  # type: ignore[list-item]
    for value in (1.0, 0.7):
        assert helper.answer(json.dumps({"verb": "set", "name": "fan", "value": value}).encode())[
            "ok"
        ]
    assert seen == [{"fan": {"place": 0.5}}] * 2
    assert helper.restore() == []
    assert knob.place == 0.5


# --- its own file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"fn": "auto"}, "unknown key fn"),
        ({"fan_lowest_ratio": 0.0}, "fan_lowest_ratio"),
        ({"fan": 1}, "fan"),
        ({"frequency_get": ["/bin/true"]}, "frequency_set"),
        (
            {
                "frequency_get": ["true"],
                "frequency_set": ["/x", "{mhz}"],
                "frequencies_mhz": [1, 2],
            },
            "full path",
        ),
        ({"frequency_get": ["/x"], "frequency_set": ["/x"], "frequencies_mhz": [1, 2]}, "{mhz}"),
        (
            {"frequency_get": ["/x"], "frequency_set": ["/x", "{mhz}"], "frequencies_mhz": [2, 1]},
            "ascending",
        ),
    ],
)
def test_a_mistake_in_its_file_is_named(board: Board, values: dict[str, Any], word: str) -> None:
    """Exit 78 with the key; nothing is moved."""
    board.configure(**values)
    done = subprocess.run(
        board.command("--socket", str(board.socket)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 78
    assert word in done.stderr
    assert board.fan() == BEFORE


def test_the_example_names_every_key_with_its_default(board: Board) -> None:
    """systemd/levers.toml.example is the same as no file, and leaves no key out."""
    example = Path(__file__).parent.parent / "systemd" / "levers.toml.example"
    shutil.copy(example, board.config)
    board.config.chmod(0o644)
    assert read(board.config, board.sysfs) == read(board.folder / "none", board.sysfs)
    keys = re.findall(r"^(\w+) = ", example.read_text(encoding="utf-8"), flags=re.M)
    board.configure(nonsense=1)
    with pytest.raises(ConfigError, match=f"there are {', '.join(keys)}"):
        read(board.config, board.sysfs)


def test_a_file_that_others_may_write_is_not_obeyed(board: Board) -> None:
    """Whoever may write the file could run commands as root: refused."""
    board.config.chmod(0o666)
    done = subprocess.run(
        board.command("--socket", str(board.socket)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 78
    assert "writable by nobody else" in done.stderr


def test_with_several_fans_none_is_guessed(board: Board) -> None:
    """Two fans: the helper offers none until one is named, then that one alone."""
    board.put(pwm2="80", pwm2_enable="1")
    with board.helper(), Asker(board.socket) as asker:
        answer = asker.ask(verb="list")
        assert answer["levers"] == []
        assert any("pwmfan/pwm1, pwmfan/pwm2" in note for note in answer["notes"])
    board.configure(fan="pwmfan/pwm2")
    with board.helper(), Asker(board.socket) as asker:
        assert [lever["name"] for lever in asker.ask(verb="list")["levers"]] == ["pwmfan/pwm2"]


def test_commands_come_from_its_own_file_alone(board: Board) -> None:
    """The configured tool moves the clock to the gear at or below what was asked, and back."""
    tool = str(clock_tool(board.folder))
    board.configure(
        frequency_get=[tool, "get"],
        frequency_set=[tool, "set", "{mhz}"],
        frequencies_mhz=[400, 600, 800],
        fan="off",
    )
    with board.helper(), Asker(board.socket) as asker:
        assert asker.ask(verb="set", name="command/clock", value=700)["value"] == 600
        assert (board.folder / "mhz").read_text() == "600\n"
    with board.helper():
        until(lambda: (board.folder / "mhz").read_text() == "800\n")


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="no systemd here")
def test_systemds_socket_starts_it_and_it_ends_when_unused(board: Board) -> None:
    """It serves on the descriptor it is given, and leaves once nobody needs it."""
    program = [
        "systemd-socket-activate",
        "-l",
        str(board.socket),
        *board.command("--idle-s", "0.2"),
    ]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as systemd:
        until(board.socket.exists)
        with Asker(board.socket) as asker:
            assert asker.ask(verb="set", name=FAN, value=1)["ok"]
        assert systemd.wait(20) == 0
    assert board.fan() == BEFORE


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.floats(1, 5000), min_size=2, unique=True).map(sorted),
)
def test_a_clamped_clock_is_never_above_what_was_asked(asked: float, gears: list[float]) -> None:
    """The gear below, else the lowest there is."""
    got = clamped("frequency", gears, asked)
    assert got in gears
    assert got <= asked or got == gears[0]
