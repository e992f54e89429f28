"""The sides of bench_npu.py: the real NPU worker as a child process, and onnxruntime alone.

Both run the same graph out of the same .om, with the same threads and session options.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edged import wire
from edged.twin import om
from edged.twin.state import TwinState
from edged.worker.om.arena import piece_bytes

WAIT_S = 300.0
_ATTEMPTS = 5  # at a block that runs at one batch size from its first step to its last
_TIMES = {
    "load_s": re.compile(r"loaded in ([\d.]+) s, prepared"),
    "first_inference_s": re.compile(r"first inference in ([\d.]+) s"),
}


@dataclass(frozen=True)
class Block:
    """Decode steps in a row at one batch. period_s: from report to report, each of them.

    host_s, device_s: per step, outside the execute and as the board's model has it.
    """

    period_s: list[float]
    host_s: float
    device_s: float


class Worker:
    """The daemon's end of a worker; blocking."""

    def __init__(self, folder: Path, twin: TwinState, slots: int, chunk: int, log: Path) -> None:
        self._twin, self._log, self._streams = twin, log, 0
        self._frames = wire.DaemonFrames()
        self._waiting: list[wire.ToDaemon] = []
        started_s = time.monotonic()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(WAIT_S)
        command = [sys.executable, "-m", "edged.worker", "--engine", "npu"]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | {"EDGED_TWIN": str(twin.folder)},
            )
        theirs.close()
        self._say(wire.Launch("npu", str(folder), slots, 0, 0, chunk))
        self._until(lambda m: isinstance(m, wire.Ready))
        self.ready_s = time.monotonic() - started_s

    def times(self) -> dict[str, float]:
        """Seconds of the phases, as the worker logged them."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        found = {name: pattern.search(text) for name, pattern in _TIMES.items()}
        return {n: float(m[1]) for n, m in found.items() if m} | {"ready_s": self.ready_s}

    def decode(self, batch: int, steps: int) -> Block:
        """One-token prompts: every step decodes `batch` streams, from the first on."""
        for _ in range(_ATTEMPTS):
            before = self._counters()
            reports, heard_s = self._run([([100 + i], steps) for i in range(batch)])
            after = self._counters()
            if all(r.batch == batch for r in reports):
                count = after["steps_total"] - before["steps_total"]
                gone = {name: (after[name] - before[name]) / count for name in after}
                step_s = sum(r.step_s for r in reports) / count
                periods = [b - a for a, b in itertools.pairwise(heard_s)]
                return Block(periods, step_s - gone["busy_s"], gone["device_time_s"])
        raise SystemExit(f"bench: no block of {batch} streams stayed together")

    def first_token_s(self, prompt: Sequence[int]) -> float:
        started_s = time.monotonic()
        _, heard_s = self._run([(prompt, 1)])
        return heard_s[-1] - started_s

    def serve(self, requests: Sequence[tuple[Sequence[int], int]], at_once: int) -> float:
        """All of them; device allocations meanwhile."""
        before = self._twin.get("allocations_total")
        for start in range(0, len(requests), at_once):
            self._run(requests[start : start + at_once])
        return self._twin.get("allocations_total") - before

    def close(self) -> None:
        self._socket.close()  # an orphaned worker closes its device and ends
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _counters(self) -> dict[str, float]:
        return {n: self._twin.get(n) for n in ("steps_total", "busy_s", "device_time_s")}

    def _run(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> tuple[list[wire.Report], list[float]]:
        """(prompt, max_tokens) of each, all at once; every step's report and when it came."""
        self._say(*(self._submit(prompt, count) for prompt, count in requests))
        reports, heard_s, left = [], [], len(requests)
        while left:
            message = self._hear()
            if not isinstance(message, wire.Report):
                continue
            reports.append(message)
            heard_s.append(time.monotonic())
            left -= sum(row.finish != "" for row in message.rows)
            if any(row.finish not in ("", "length") for row in message.rows):
                raise SystemExit(f"bench: {message.rows}")
        return reports, heard_s

    def _submit(self, prompt: Sequence[int], max_tokens: int) -> wire.Submit:
        self._streams += 1
        return wire.Submit(
            stream=self._streams,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=0,
            logprobs=-1,
            ignore_eos=True,
        )

    def _say(self, *messages: wire.ToWorker) -> None:
        self._socket.sendall(b"".join(wire.encode(message) for message in messages))

    def _until(self, wanted: Callable[[wire.ToDaemon], bool]) -> None:
        while not wanted(self._hear()):
            pass

    def _hear(self) -> wire.ToDaemon:
        while not self._waiting:
            data = self._socket.recv(1 << 16)
            if not data:
                raise SystemExit(f"bench: the worker ended; see below\n{self._log.read_text()}")
            self._waiting = list(self._frames.messages(data))
        message = self._waiting.pop(0)
        if isinstance(message, wire.Fault):
            raise SystemExit(f"bench: {message.kind} fault of the worker: {message.detail}")
        return message


class Bare:
    """Nothing but the session: bound once, run again and again. No cache is kept, no token drawn:
    no step loop can be faster. Its tensors lie as the twin's do, on huge pages where there are."""

    def __init__(self, path: Path, threads: int, context: int, batches: Sequence[int]) -> None:
        found = om.read_file(path)
        self.header = found.header
        self._session = _session(path, found, threads)
        self._memory: list[mmap.mmap] = []  # bound memory must outlive the binding
        self._bindings = {b: self._bind(b, context) for b in batches}

    def step_s(self, batch: int, steps: int) -> list[float]:
        took = []
        for _ in range(steps):
            started_s = time.monotonic()
            self._session.run_with_iobinding(self._bindings[batch])
            took.append(time.monotonic() - started_s)
        return took

    def _bind(self, batch: int, context: int) -> Any:
        wanted = (batch, 1, context)
        gear = next(g for g in self.header.gears if (g["B"], g["T"], g["S"]) == wanted)
        fills = {"kv_pos": np.arange(context), "logit_idx": np.arange(batch), "past_len": 20}
        binding = self._session.io_binding()
        sides = (self.header.inputs, binding.bind_input), (self.header.outputs, binding.bind_output)
        tensors = [(t, t.shape(gear), bind) for side, bind in sides for t in side]
        sizes = [piece_bytes(_bytes(t, shape)) for t, shape, _ in tensors]
        # Private: shared memory gets no huge pages, and the twin's device memory has them.
        memory = mmap.mmap(-1, sum(sizes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.append(memory)
        at = 0
        for (tensor, shape, bind), size in zip(tensors, sizes, strict=True):
            array = np.ndarray(shape, tensor.dtype, memory, at)
            array[...] = fills.get(tensor.name, 0)
            bind(tensor.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            at += size
        return binding


def _bytes(tensor: om.Tensor, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * np.dtype(tensor.dtype).itemsize


def _session(path: Path, found: om.OmFile, threads: int) -> Any:
    """With the options of the twin's own session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent)
    )
    graph = om.located_graph(path, found)
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
