"""Hand-written fakes for the worker: a tiny executor whose tokens depend on every cached row.

A mixed-up slot, position, stale or lost row changes what it says; nothing else does.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edged import wire
from edged.core import Limits
from edged.worker.contract import ModelSpec
from edged.worker.executor import Batch, StepError
from edged.worker.link import Link
from edged.worker.loop import StepLoop
from edged.worker.plan import Gears
from edged.worker.selftest import SelfTester

VOCAB = 97
EOS = 7
POISON = -1
_PRIME = 1_000_003


def fake_spec(context: int = 64) -> ModelSpec:
    return ModelSpec(
        folder=Path("fake"),
        name="fake",
        graph="fake",
        layers=1,
        kv_heads=1,
        head_dim=1,
        vocab=VOCAB + 3,  # a head wider than the tokenizer, as some models have
        vocab_tokens=VOCAB,
        context_tokens=context,
        max_context_tokens=context,
        eos_ids=frozenset({EOS}),
        cache_dtype="fp32",
    )


def next_token(rows: Sequence[int]) -> int:
    """What the fake model says after these cache rows; depends on each and on their order."""
    state = 17
    for row in rows:
        state = (state * 31 + row) % _PRIME
    return state % VOCAB


def row_of(token: int, position: int) -> int:
    return token * 1009 + position + 1


class FakeExecutor:
    """A cache of one number per token; logits peak at `next_token`. Faults on request:
    `failures` next runs raise StepError, and slots in `poisoned` yield NaN once."""

    def __init__(
        self,
        slots: int = 4,
        gears: Gears | None = None,
        step_s: float = 0.0,
        context: tuple[int, ...] = (8, 16, 32, 64),
    ) -> None:
        self.gears = gears or Gears(tuple(range(1, slots + 1)), (), context)
        self.context = self.gears.context[0]
        self.cache = np.zeros((slots, self.context), np.int64)
        self.failures = 0
        self.poisoned: set[int] = set()
        self.poisonings = 0
        self.step_s = step_s
        self.now_s = 0.0
        self.runs: list[tuple[int, int, int]] = []  # (B, T, active)
        self.repacks: list[int] = []
        self.copies: list[tuple[int, int, int]] = []
        self.closed = False

    def clock(self) -> float:
        return self.now_s

    def run(self, batch: Batch) -> np.ndarray:
        size, tokens = batch.shape
        assert size in self.gears.batch
        assert not self.gears.tokens or tokens in (1, *self.gears.tokens)
        self.now_s += self.step_s
        if self.failures:
            self.failures -= 1
            raise StepError("the fake device failed")
        self.runs.append((size, tokens, sum(count > 0 for count in batch.fresh)))
        logits = np.full((size, VOCAB + 3), 0.5, np.float32)
        logits[:, VOCAB:] = 9.0  # padded ids are tempting and must never be drawn
        for row, count in enumerate(batch.fresh):
            if count:
                self._row(batch, row, count, logits[row])
        return logits

    def _row(self, batch: Batch, row: int, count: int, logits: np.ndarray) -> None:
        slot, past = batch.lo + row, int(batch.past_len[row, 0])
        assert past + count <= self.context
        positions = batch.position_ids[row]
        assert list(positions[:count]) == list(range(past, past + count))
        assert all(positions[count:] > past + count - 1)
        cache = self.cache[slot]
        for i in range(count):
            cache[past + i] = row_of(int(batch.input_ids[row, i]), int(positions[i]))
        assert batch.logit_idx[row] == row * batch.shape[1] + count - 1
        if slot in self.poisoned:
            self.poisoned.remove(slot)
            self.poisonings += 1
            cache[past] = POISON
        if (cache == POISON).any():  # as 0 x NaN is NaN, even a masked row spoils all
            logits[:] = np.nan
            return
        logits[next_token(cache[: past + count].tolist())] = 5.0

    def repack(self, context: int, rows: Sequence[int]) -> None:
        self.repacks.append(context)
        cache = np.zeros((len(self.cache), context), np.int64)
        for slot, count in enumerate(rows):
            cache[slot, :count] = self.cache[slot, :count]
        self.cache, self.context = cache, context

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self.copies.append((source, target, rows))
        self.cache[target, :rows] = self.cache[source, :rows]

    def zero_slot(self, slot: int) -> None:
        self.cache[slot] = 0

    def close(self) -> None:
        self.closed = True


def solo_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model says to a prompt, computed without any worker."""
    rows = [row_of(token, position) for position, token in enumerate(prompt)]
    said: list[int] = []
    while len(said) < count:
        token = next_token(rows)
        if token == EOS:
            break
        said.append(token)
        rows.append(row_of(token, len(rows)))
    return said


def ask(stream: int, tokens: Sequence[int], max_tokens: int = 8, **more: object) -> wire.Submit:
    """A greedy Submit; `more` replaces any of its fields."""
    fields: dict[str, object] = {
        "stream": stream,
        "tokens": list(tokens),
        "prompt_tokens": len(tokens),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "logprobs": -1,
        "ignore_eos": False,
    }
    return wire.Submit(**(fields | more))  # type: ignore[arg-type]


class Rig:
    """A real step loop on a real socketpair; the test is the daemon and turns the crank."""

    def __init__(
        self,
        executor: FakeExecutor,
        spec: ModelSpec,
        limits: Limits,
        tester: SelfTester | None = None,
    ) -> None:
        self.executor = executor
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs = theirs
        self._frames = wire.DaemonFrames()
        slots = len(executor.cache) if isinstance(executor, FakeExecutor) else limits.max_batch
        clock = {"clock": executor.clock} if isinstance(executor, FakeExecutor) else {}
        self.loop = StepLoop(Link(theirs), executor, spec, limits, slots, tester=tester, **clock)
        self.messages: list[wire.ToDaemon] = []
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, list[str]] = {}
        self.rows: list[wire.Row] = []

    def say(self, *messages: wire.ToWorker) -> None:
        for message in messages:
            self._ours.sendall(wire.encode(message))

    def turn(self, times: int = 1) -> list[wire.ToDaemon]:
        """Turn the loop; the frames it sent."""
        heard: list[wire.ToDaemon] = []
        for _ in range(times):
            self.loop.turn(0.0)
            heard += self._hear()
        return heard

    def drain(self, limit: int = 5000) -> None:
        """Turn until the worker is idle; fails when it never is."""
        self.turn()
        for _ in range(limit):
            if not self.busy:
                return
            self.turn()
        raise AssertionError(f"still busy after {limit} turns: {sorted(self.open_streams)}")

    @property
    def open_streams(self) -> set[int]:
        return set(self.loop._streams)

    @property
    def busy(self) -> bool:
        return bool(self.loop._streams)

    @property
    def reports(self) -> list[wire.Report]:
        return [m for m in self.messages if isinstance(m, wire.Report)]

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def _hear(self) -> list[wire.ToDaemon]:
        heard: list[wire.ToDaemon] = []
        while True:
            try:
                data = self._ours.recv(1 << 20)
            except BlockingIOError:
                break
            heard += list(self._frames.messages(data))
        for message in heard:
            if isinstance(message, wire.Report):
                for row in message.rows:
                    self.rows.append(row)
                    self.ids.setdefault(row.stream, []).extend(row.ids)
                    if row.finish:
                        self.ends.setdefault(row.stream, []).append(row.finish)
        self.messages += heard
        return heard
