"""A real worker process on a real socketpair with the demo model: its life, its rules, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fakes_worker import ask

from edged import wire

WAIT_S = 120.0  # generous: the machine may be busy


class Daemon:
    """The daemon's end of a worker: blocking, for tests."""

    def __init__(self, engine: str = "cpu") -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(WAIT_S)
        self.process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "edged.worker",
                "--engine",
                engine,
                "--fd",
                str(theirs.fileno()),
            ),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"NOTIFY_SOCKET": "/nowhere"},
        )
        theirs.close()
        self.frames = wire.DaemonFrames()
        self.waiting: list[wire.ToDaemon] = []

    def say(self, *messages: wire.ToWorker) -> None:
        for message in messages:
            self.socket.sendall(wire.encode(message))

    def hear(self) -> wire.ToDaemon:
        """The next frame; EOFError when the worker has closed the socket."""
        while not self.waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.waiting = list(self.frames.messages(data))
        return self.waiting.pop(0)

    def until(self, wanted: Callable[[wire.ToDaemon], bool]) -> list[wire.ToDaemon]:
        """Frames up to and including the first wanted one."""
        heard = [self.hear()]
        while not wanted(heard[-1]):
            heard.append(self.hear())
        return heard

    def launch(self, folder: Path, golden_dir: str = "", **more: int) -> wire.Ready:
        assert isinstance(self.hear(), wire.Hello)
        fields = {"slots": 4, "context_tokens": 0, "threads": 2, "prefill_chunk": 64} | more
        self.say(wire.Launch("cpu", str(folder), **fields, golden_dir=golden_dir))
        loading, testing, ready = self.hear(), self.hear(), self.hear()
        assert isinstance(loading, wire.Phase) and loading.name == "loading"
        assert loading.deadline_s > 60
        assert isinstance(testing, wire.Phase) and testing.name == "self_test"
        assert testing.deadline_s > 10
        assert isinstance(ready, wire.Ready), ready
        return ready

    def answer(self, submit: wire.Submit) -> list[int]:
        """Submit and wait for the end; the ids."""
        self.say(submit)
        heard = self.until(lambda m: finish_of(m, submit.stream) != "")
        return [i for m in heard for row in rows_of(m, submit.stream) for i in row.ids]

    def exit_code(self) -> int:
        return self.process.wait(WAIT_S)


def rows_of(message: wire.ToDaemon, stream: int) -> list[wire.Row]:
    rows = message.rows if isinstance(message, wire.Report) else []
    return [row for row in rows if row.stream == stream]


def finish_of(message: wire.ToDaemon, stream: int) -> str:
    return "".join(row.finish for row in rows_of(message, stream))


@contextlib.contextmanager
def daemon(engine: str = "cpu") -> Iterator[Daemon]:
    made = Daemon(engine)
    try:
        yield made
    finally:
        made.socket.close()
        made.process.kill()
        made.process.communicate()


@pytest.fixture(scope="module")
def folder() -> Path:
    from reference import exported

    return exported("int8")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.model
def test_a_worker_serves_and_obeys_the_rules_of_a_child(folder: Path) -> None:
    """Hello, launch, ready, submit, report; and it is the first the kernel would kill."""
    with daemon() as d:
        ready = d.launch(folder, context_tokens=2048)
        assert (ready.slots, ready.context_tokens, ready.vocab_tokens) == (4, 2048, 49152)
        pid = d.process.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"
        ignored = next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if "SigIgn" in line
        )
        assert int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1
        first = d.answer(ask(1, [504, 2988, 314], 8))
        assert len(first) == 8
        os.kill(pid, signal.SIGINT)
        assert d.answer(ask(2, [504, 2988, 314], 8)) == first
        d.say(wire.Shutdown())
        assert d.exit_code() == 0


@pytest.mark.model
def test_an_idle_worker_uses_no_cpu(folder: Path) -> None:
    """After the last step its threads sleep: no spinning, no polling."""
    with daemon() as d:
        d.launch(folder)
        d.answer(ask(1, [504, 2988, 314], 8))
        process = psutil.Process(d.process.pid)
        time.sleep(0.3)
        before = process.cpu_times()
        time.sleep(2.0)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.02


@pytest.mark.model
def test_a_cancel_in_a_prefill_of_6000_tokens_costs_one_chunk(folder: Path) -> None:
    """The slot of a client that leaves is free after the chunk that was running."""
    with daemon() as d:
        d.launch(folder)
        d.say(wire.SetLimits(4, 1.0, 64, True))
        d.say(ask(1, [20 + k % 4000 for k in range(6000)], 10))
        first = d.until(lambda m: isinstance(m, wire.Report) and m.kind == "prefill")[-1]
        assert isinstance(first, wire.Report) and first.free_slots == 3
        d.say(wire.Cancel(1))
        heard = d.until(lambda m: finish_of(m, 1) == "cancelled")
        assert sum(isinstance(m, wire.Report) and m.kind == "prefill" for m in heard) <= 1
        assert isinstance(heard[-1], wire.Report)
        assert (heard[-1].free_slots, heard[-1].deadline_s) == (4, 0)
        assert len(d.answer(ask(2, [504, 2988, 314], 4))) == 4


@pytest.mark.model
def test_memory_that_ends_is_told_as_such(folder: Path) -> None:
    """A cache that cannot grow is Fault("memory"), so that the ladder asks for less."""
    with daemon() as d:
        d.launch(folder)
        process = psutil.Process(d.process.pid)
        limit = process.memory_info().vms + (16 << 20)
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        d.say(ask(1, [20 + k % 4000 for k in range(2000)], 10))
        fault = d.until(lambda m: isinstance(m, wire.Fault))[-1]
        assert isinstance(fault, wire.Fault)
        assert (fault.kind, d.exit_code()) == ("memory", 1), fault
        assert fault.detail.startswith("prefill: "), fault


@pytest.mark.model
def test_the_end_of_the_socket_ends_the_worker(folder: Path) -> None:
    """A daemon that is gone needs no answer: the worker exits in the middle of its work."""
    with daemon() as d:
        d.launch(folder)
        d.say(ask(1, [504, 2988, 314], 2000, ignore_eos=True))
        d.until(lambda m: isinstance(m, wire.Report))
        d.socket.close()
        assert d.exit_code() == 0


def test_a_worker_waits_for_its_launch_and_leaves_on_shutdown() -> None:
    """Before anything is loaded, Shutdown and end of file both mean exit 0."""
    for end in (lambda d: d.say(wire.Shutdown()), lambda d: d.socket.close()):
        with daemon() as d:
            hello = d.hear()
            assert isinstance(hello, wire.Hello)
            assert (hello.version, hello.pid) == (wire.VERSION, d.process.pid)
            end(d)
            assert d.exit_code() == 0


PARENT = """
import socket, subprocess, sys
ours, theirs = socket.socketpair()
child = subprocess.Popen(
    (sys.executable, "-m", "edged.worker", "--engine", "cpu", "--fd", str(theirs.fileno())),
    pass_fds=(theirs.fileno(),), start_new_session=True)
ours.recv(100)
pids = [child.pid]
if sys.argv[1] == "leak":  # somebody else keeps the socket open: only the signal can tell
    pids.append(subprocess.Popen(
        ("sleep", "60"), stdout=subprocess.DEVNULL, pass_fds=(ours.fileno(), theirs.fileno())).pid)
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["plain", "leak"])
def test_the_death_of_the_parent_kills_the_worker(how: str) -> None:
    """SIGKILL of the daemon takes the worker along, even if its socket lives on elsewhere."""
    parent = subprocess.Popen(
        (sys.executable, "-c", PARENT, how),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, *others = (int(word) for word in parent.stdout.readline().split())
    assert not gone(pid)
    parent.kill()
    parent.communicate()
    try:
        wait_until(lambda: gone(pid))
    finally:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: None, "cannot read"),
        (lambda folder: (folder / "model.json").write_text("{}"), "not a model description"),
        (lambda folder: (folder / "model.json").write_text("nonsense"), "not a model description"),
    ],
)
def test_a_load_failure_is_told_in_words(
    tmp_path: Path, spoil: Callable[[Path], object], word: str
) -> None:
    """Fault("load", reason) and a non-zero exit."""
    spoil(tmp_path)
    fault = _failed_launch(wire.Launch("cpu", str(tmp_path), 4, 0, 1, 64))
    assert (fault.kind, word in fault.detail) == ("load", True), fault


def test_an_engine_that_is_not_built_in_says_so(tmp_path: Path) -> None:
    """A launch beyond what the worker can do is refused, not guessed."""
    fault = _failed_launch(wire.Launch("cpu", str(tmp_path), 0, 0, 1, 64))
    assert (fault.kind, "slots" in fault.detail) == ("load", True), fault


@pytest.mark.model
def test_a_damaged_graph_is_a_load_fault(folder: Path, tmp_path: Path) -> None:
    """model.json is fine but the graph is not one, or another one than it describes."""
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    fault = _failed_launch(wire.Launch("cpu", str(tmp_path), 4, 0, 1, 64))
    assert (fault.kind, "model.onnx" in fault.detail) == ("load", True), fault


def _failed_launch(launch: wire.Launch) -> wire.Fault:
    with daemon() as d:
        assert isinstance(d.hear(), wire.Hello)
        d.say(launch)
        fault = d.until(lambda m: isinstance(m, wire.Fault))[-1]
        assert isinstance(fault, wire.Fault)
        assert d.exit_code() == 1
        return fault
