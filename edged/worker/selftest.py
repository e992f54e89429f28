"""The golden self test: an engine must say what its reference says, or it is not used.

Runs the prompt in two chunks and then decodes with the reference's own tokens, through the
executor as real streams do, in a slot the caller names. Sends nothing, keeps no stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edged import wire
from edged.errors import EdgedError
from edged.worker.contract import ModelSpec
from edged.worker.executor import Batch, Executor, Floats, StepError, empty_batch
from edged.worker.faults import STEP_ATTEMPTS
from edged.worker.plan import gear
from edged.worker.reference import Golden, Store, made_up_prompt, of_model
from edged.worker.rows import put_row
from edged.worker.rules import log

POSITIONS = 4  # compared: one after the prompt, one for each of three batch sizes
MAX_LOGPROB_OFF = 0.5
_TOP_OF_REFERENCE = 3
_RECORDED = 8  # likely ids kept per token
_SAME = 1e-3  # logits whose spread is below it say nothing


class SelfTestError(EdgedError):
    """This engine's output is wrong; the message says where and what differs."""


class SelfTester:
    """golden: what is expected; made by `prove`."""

    def __init__(
        self, executor: Executor, spec: ModelSpec, slots: int, prefill_chunk: int, golden: Golden
    ) -> None:
        self.golden = golden
        self._runner = _Runner(executor, spec, slots, prefill_chunk)

    def run(self, slot: int) -> str:
        """Empty when the engine agrees, else where and what differs.

        Overwrites the slot's first rows; what it leaves there is not finite only when it
        failed. Raises MemoryError, StepError.
        """
        golden = self.golden
        count = self._runner.positions(golden.prompt_ids, len(golden.tokens))
        for i, row in enumerate(self._runner.logits(slot, golden.prompt_ids, golden.tokens, count)):
            wrong = _degenerate(row) or _differs(row, golden.tokens[i], golden.top_logprobs[i])
            if wrong:
                return f"at token {i + 1} of {count} after the golden prompt {wrong}"
        return ""


def prove(
    executor: Executor, spec: ModelSpec, launch: wire.Launch, library: Callable[[], str]
) -> SelfTester:
    """The test before READY, in slot 0. library: names the runtime and its version.

    A model without a reference is held to what it said at its first start, kept in
    launch.golden_dir; without such a folder to what it says now. Raises SelfTestError.
    """
    runner = _Runner(executor, spec, launch.slots, launch.prefill_chunk)
    golden = of_model(spec)
    store = None
    if golden is None or not runner.fits(golden):
        golden = None
        if launch.golden_dir:
            store = Store(Path(launch.golden_dir), spec, library())
            golden = store.read()
    if golden is not None and runner.fits(golden):
        tester = SelfTester(executor, spec, launch.slots, launch.prefill_chunk, golden)
        wrong = tester.run(0)
        if wrong:
            raise _refused(spec, wrong)
        return tester
    golden = _record(runner, spec)
    if store is not None:
        store.write(golden)
    else:
        log(f"{spec.name} has no golden answer: only that it says something was tested")
    return SelfTester(executor, spec, launch.slots, launch.prefill_chunk, golden)


def _record(runner: _Runner, spec: ModelSpec) -> Golden:
    """What the engine says now, greedily. Raises SelfTestError where that cannot be right."""
    prompt = made_up_prompt(spec, runner.room)
    golden = Golden(prompt, [], [])
    for i, row in enumerate(
        runner.logits(0, prompt, golden.tokens, runner.positions(prompt, POSITIONS))
    ):
        wrong = _degenerate(row)
        if wrong:
            raise _refused(spec, f"at token {i + 1} {wrong}")
        logprobs = _logprobs(row)
        best = np.argsort(-logprobs, kind="stable")[:_RECORDED]
        golden.tokens.append(int(best[0]))
        golden.top_logprobs.append([(int(b), round(float(logprobs[b]), 6)) for b in best])
    return golden


def _refused(spec: ModelSpec, wrong: str) -> SelfTestError:
    return SelfTestError(
        f"self test of {spec.graph_path} failed: {wrong}; this engine's output is wrong, so it is "
        "not used: run `edged export` again, and if that does not help check the driver's version"
    )


class _Runner:
    """A prompt and the tokens after it through an executor, with the shapes of real streams."""

    def __init__(self, executor: Executor, spec: ModelSpec, slots: int, prefill_chunk: int) -> None:
        self._executor, self._spec = executor, spec
        self._slots, self._chunk = slots, prefill_chunk
        batches = executor.gears.batch
        self._batches = (batches[0], batches[len(batches) // 2], batches[-1])
        self.room = executor.gears.context[0]  # every context holds it: nothing is re-packed

    def fits(self, golden: Golden) -> bool:
        return len(golden.prompt_ids) <= self.room

    def positions(self, prompt: Sequence[int], tokens: int) -> int:
        return min(POSITIONS, tokens, self.room - len(prompt) + 1)

    def logits(
        self, slot: int, prompt: Sequence[int], tokens: Sequence[int], positions: int
    ) -> Iterator[Floats]:
        """[V] after the prompt and after each token; valid until the next one. tokens may grow
        while this runs: tokens[i] is read after the i-th was yielded."""
        chunk = max(1, min(self._chunk, math.ceil(len(prompt) / 2)))
        past = 0
        while past < len(prompt):
            wide = gear(min(len(prompt) - past, chunk), self._executor.gears.tokens)
            ids = prompt[past : past + min(chunk, wide)]
            row = self._run(slot, 1, wide, ids, past)
            past += len(ids)
        yield row
        for i in range(positions - 1):
            row = self._run(slot, self._batches[i % 3], 1, tokens[i : i + 1], past + i)
            yield row

    def _run(self, slot: int, width: int, tokens: int, ids: Sequence[int], past: int) -> Floats:
        lo = min(slot, self._slots - width)
        batch = empty_batch(lo, width, tokens)
        put_row(batch, slot - lo, ids, past, self._spec.max_context_tokens)
        return self._execute(batch)[slot - lo, : self._spec.vocab_tokens]

    def _execute(self, batch: Batch) -> Floats:
        """Repeats what may be repeated, as the step loop does."""
        for attempt in range(1, STEP_ATTEMPTS):
            try:
                return self._executor.run(batch)
            except StepError as error:
                log(f"step of the self test failed, attempt {attempt}: {error}")
        return self._executor.run(batch)


def _degenerate(row: Floats) -> str:
    """Why no reference is needed to call this output wrong."""
    if not np.isfinite(row).all():
        return "the logits are not finite (NaN or infinite)"
    if float(row.max()) - float(row.min()) < _SAME:
        return "all logits are the same"
    return ""


def _differs(row: Floats, token: int, reference: Sequence[tuple[int, float]]) -> str:
    logprobs = _logprobs(row)
    likeliest = int(logprobs.argmax())
    best = [i for i, _ in reference[:_TOP_OF_REFERENCE]]
    if likeliest not in best:
        return f"the likeliest id is {likeliest}, of the reference {', '.join(map(str, best))}"
    found, wanted = float(logprobs[token]), dict(reference)[token]
    if not abs(found - wanted) < MAX_LOGPROB_OFF:
        return (
            f"the log probability of id {token} is {found:.3f}, of the reference {wanted:.3f} "
            f"(less than {MAX_LOGPROB_OFF} apart is allowed)"
        )
    return ""


def _logprobs(row: Floats) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Natural logs, float64 [V]."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    wide -= math.log(float(np.exp(wide).sum()))
    return wide
