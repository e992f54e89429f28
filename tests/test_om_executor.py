"""The step loop on compiled models through the twin: the CPU engine's tokens, without surprises."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fakes_om import CHUNK, SLOTS, TwinBoard, om_spec, prompts, tiny_model, twin_rig
from fakes_worker import Rig, ask
from hypothesis import given, settings
from hypothesis import strategies as st

from edged import wire
from edged.core import Limits
from edged.twin.faults import Fault, Faults
from edged.worker.contract import ContractError, read_spec
from edged.worker.executor import StepError, empty_batch
from edged.worker.om.codes import FatalDeviceError, OutOfDeviceMemory
from edged.worker.om.executor import OmExecutor
from edged.worker.ort import OrtExecutor

RC, EP = 0, 1
MODES = pytest.mark.parametrize("mode", [RC, EP], ids=["rc", "ep"])
SAID = 24
LENGTHS = (3, 17, 30, 45)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(models: Path) -> Path:
    return tiny_model(models / "tiny")


def ort_says(folder: Path, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each prompt alone on the CPU executor."""
    said = []
    spec = read_spec(folder)
    executor = OrtExecutor(spec, 1, 1)
    for prompt in asked:
        with closing(Rig(executor, spec, Limits(1, prefill_chunk=256))) as rig:  # type: ignore[arg-type]
            rig.say(ask(1, prompt, SAID))
            rig.drain()
            said.append(rig.ids[1])
    return said


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(8, LENGTHS)


@pytest.fixture(scope="module")
def alone(tiny: Path, asked: list[list[int]]) -> list[list[int]]:
    return ort_says(tiny, asked)


@pytest.fixture
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwinBoard]:
    made = TwinBoard(tmp_path / "twin", getattr(request, "param", RC))
    yield made
    made.close()


@pytest.fixture
def rig(board: TwinBoard, tiny: Path) -> Iterator[Rig]:
    with twin_rig(board, tiny) as made:
        yield made


BOTH = pytest.mark.parametrize("board", [RC, EP], ids=["rc", "ep"], indirect=True)


# --- tokens --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tokens_equal_the_cpu_engines(
    board: TwinBoard, models: Path, asked: list[list[int]], architecture: str
) -> None:
    """Every family, on a shared-memory board and on a card: the same greedy ids in fp32, alone
    and in a batch of mixed lengths with chunked prefill."""
    folder = models / architecture
    if not folder.exists():
        tiny_model(folder, architecture)
    expected = ort_says(folder, asked[:4])
    assert len({i for ids in expected for i in ids}) > 20  # the model says something
    with twin_rig(board, folder) as rig:
        rig.say(ask(9, asked[1], SAID))
        rig.drain()
        assert rig.ids[9] == expected[1]
        for i, prompt in enumerate(asked[:4]):
            rig.say(ask(i, prompt, SAID))
        rig.drain()
        assert [rig.ids[i] for i in range(4)] == expected
        assert max(report.batch for report in rig.reports) == 4


@BOTH
def test_fp16_models_say_the_same_on_both_executors(
    board: TwinBoard, models: Path, asked: list[list[int]]
) -> None:
    """A half-precision cache and graph: the same ids as onnxruntime alone."""
    folder = models / "half"
    if not folder.exists():
        tiny_model(folder, dtype="fp16")
    with twin_rig(board, folder) as rig:
        for i, prompt in enumerate(asked[:4]):
            rig.say(ask(i, prompt, SAID))
        rig.drain()
        assert [rig.ids[i] for i in range(4)] == ort_says(folder, asked[:4])


@BOTH
def test_growth_and_shrinking_of_the_context_change_nothing(
    rig: Rig, asked: list[list[int]], alone: list[list[int]]
) -> None:
    """A stream that outgrows the first context gear has its rows, and its neighbours', moved in
    place; after it is gone the cache shrinks again."""
    rig.say(ask(0, asked[0], 90, ignore_eos=True))
    rig.say(ask(1, asked[3], SAID))
    rig.drain()
    assert rig.executor.context == 160
    assert rig.ids[0][:SAID] == alone[0]
    assert rig.ids[1] == alone[3]
    long = rig.ids[0]
    rig.say(ask(2, asked[0] + long[:-1], 1))
    rig.drain()
    assert rig.ids[2] == long[-1:]
    for i in range(3, 9):
        rig.say(ask(i, asked[i % 3], SAID))
        rig.drain()
        assert rig.ids[i] == alone[i % 3]
    assert rig.executor.context == 64


@BOTH
def test_prefixes_are_reused(rig: Rig, asked: list[list[int]], alone: list[list[int]]) -> None:
    """A second request with the same prompt takes the cached rows, in its slot or copied from a
    busy one, and says the same."""
    rig.say(ask(1, asked[3], SAID))
    rig.turn(8)  # its prompt is in the cache, and it is still going on
    rig.say(ask(2, asked[3], SAID))
    rig.drain()
    assert rig.ids[1] == rig.ids[2] == alone[3]
    cached = [row.cached_tokens for row in rig.rows if row.stream == 2]
    assert max(cached) >= len(asked[3]) - 1


@BOTH
def test_streams_above_a_lowered_max_batch_pause_and_rotate(
    rig: Rig, asked: list[list[int]], alone: list[list[int]]
) -> None:
    """Four streams with room for two: all end, with the ids they say alone."""
    rig.say(wire.SetLimits(2, 1.0, CHUNK, True))
    for i in range(4):
        rig.say(ask(i, asked[i], SAID))
    rig.drain()
    assert [rig.ids[i] for i in range(4)] == alone[:4]
    assert max(len(r.rows) for r in rig.reports) <= 2


def test_fewer_slots_use_fewer_gears(
    board: TwinBoard, tiny: Path, asked: list[list[int]], alone: list[list[int]]
) -> None:
    """With three slots the batch gear of four stays unused."""
    with twin_rig(board, tiny, slots=3) as rig:
        assert rig.executor.gears.batch == (1, 2)
        for i in range(3):
            rig.say(ask(i, asked[i], SAID))
        rig.drain()
        assert [rig.ids[i] for i in range(3)] == alone[:3]


# --- memory --------------------------------------------------------------------------------------


@MODES
def test_no_allocation_after_warm_up(mode: int, tmp_path: Path, tiny: Path) -> None:
    """A thousand requests of random length (a quarter of that on a card): the device counts not
    one allocation, and every slot is free at the end."""
    board = TwinBoard(tmp_path / "twin", mode)
    rng = np.random.default_rng(11)
    with twin_rig(board, tiny) as rig:
        for batch, tokens in ((1, CHUNK), (4, 1)):
            rig.executor.run(empty_batch(0, batch, tokens))
        before = board.allocations
        for _ in range(1000 if mode == RC else 250):
            while len(rig.open_streams) >= SLOTS:
                rig.turn()
            length, count = int(rng.integers(1, 80)), int(rng.integers(1, 6))
            rig.say(ask(len(rig.ends) + 1000 * len(rig.messages), [1] * length, count))
            rig.turn()
        rig.drain()
        assert board.allocations == before
        assert rig.reports[-1].free_slots == SLOTS
        assert {r.context for r in rig.reports} == {64, 160}
    board.close()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("sct"), st.integers(1, 70)), min_size=5, max_size=60))
def test_slots_never_leak(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path, actions: list[tuple[str, int]]
) -> None:
    """Any order of submits, cancels and steps, then an end: all slots free, each stream ended
    once."""
    board = TwinBoard(tmp_path_factory.mktemp("twin"), RC)
    with twin_rig(board, tiny) as rig:
        for number, (action, size) in enumerate(actions):
            if action == "s":
                rig.say(ask(number, list(range(size)), size % 7 + 1))
            elif action == "c" and rig.open_streams:
                rig.say(wire.Cancel(sorted(rig.open_streams)[size % len(rig.open_streams)]))
            rig.turn()
        rig.drain()
        assert all(len(ends) == 1 for ends in rig.ends.values())
        assert rig.loop._table.free_count == SLOTS
    assert board.state.get("allocations_total") - board.state.get("frees_total") == 0
    board.close()


def test_ten_thousand_aborts_leave_every_slot_free(rig: Rig, board: TwinBoard) -> None:
    """Submit and cancel, at every stage of a stream's life; nothing is left behind."""
    held = board.state.get("memory_used_bytes")
    used = rig.executor.arena.used_bytes
    for number in range(10_000):
        rig.say(ask(number, [number % 100] * (number % 40 + 1), 50))
        if number % 50 == 0:
            rig.turn(number // 50 % 4)
        rig.say(wire.Cancel(number))
        if number % 16 == 15:
            rig.turn()
    rig.drain()
    assert rig.loop._table.free_count == SLOTS
    assert not rig.open_streams
    assert board.state.get("memory_used_bytes") == held
    assert rig.executor.arena.used_bytes == used


@MODES
def test_everything_is_given_back(mode: int, tmp_path: Path, tiny: Path) -> None:
    """Closing an executor frees the arena and the model; the next one has the same room."""
    board = TwinBoard(tmp_path / "twin", mode)
    free = board.device.memory()
    for _ in range(3):
        with twin_rig(board, tiny) as rig:
            rig.say(ask(1, [1, 2, 3], 4))
            rig.drain()
            assert board.device.memory() != free
        assert board.device.memory() == free
    board.close()


def test_the_arena_is_what_was_asked_for(rig: Rig, board: TwinBoard, tiny: Path) -> None:
    """One allocation for cache, buffers and work memory, one for the weights; no more than 5 %
    of the arena is padding even on this tiny model."""
    arena = rig.executor.arena
    spec = om_spec(tiny)
    cache = 2 * spec.layers * SLOTS * spec.kv_heads * 160 * spec.head_dim * 4
    assert arena.size_bytes("cache") == cache
    assert arena.used_bytes <= arena.total_bytes <= 1.05 * arena.used_bytes
    assert board.allocations == 2


def test_a_load_that_would_not_fit_is_refused_with_the_sum(board: TwinBoard, tiny: Path) -> None:
    """Admission says what is needed and what there is, before anything is allocated."""
    _, total = board.device.memory()
    hog = board.device.malloc(total - (256 << 20))
    before = board.allocations
    with pytest.raises(OutOfDeviceMemory, match=r"arena \d+ .* MiB are available"):
        OmExecutor(om_spec(tiny), SLOTS, board.device)
    with pytest.raises(MemoryError):
        OmExecutor(om_spec(tiny), SLOTS, board.device)
    assert board.allocations == before
    board.device.free(hog)
    OmExecutor(om_spec(tiny), SLOTS, board.device).close()


def test_a_start_that_fails_half_way_gives_back_what_it_took(board: TwinBoard, tiny: Path) -> None:
    """No memory for the weights after the arena was taken: the arena is free again."""
    free = board.device.memory()
    Faults(board.state).add(Fault("oom", "allocation", after=2))
    with pytest.raises(OutOfDeviceMemory, match="load_from_mem"):
        OmExecutor(om_spec(tiny), SLOTS, board.device)
    assert board.device.memory() == free


# --- faults --------------------------------------------------------------------------------------


@BOTH
def test_a_step_without_memory_is_repeated(
    rig: Rig, board: TwinBoard, asked: list[list[int]], alone: list[list[int]]
) -> None:
    """No memory for an execute, once: the step is repeated and the ids are the same."""
    rig.say(ask(1, asked[1], SAID))
    rig.turn(3)
    Faults(board.state).add(Fault("oom", "launch", times=1))
    rig.drain()
    assert rig.ids[1] == alone[1]


def test_lasting_lack_of_memory_ends_the_worker_as_such(rig: Rig, board: TwinBoard) -> None:
    """The second time in a row it is a MemoryError, so that the next launch is a smaller one."""
    Faults(board.state).add(Fault("oom", "launch", times=0))
    rig.say(ask(1, [1, 2, 3], SAID))
    rig.turn()
    with pytest.raises(MemoryError):
        rig.turn()


@BOTH
def test_a_row_of_nan_moves_nobody_else(
    rig: Rig, board: TwinBoard, asked: list[list[int]], alone: list[list[int]]
) -> None:
    """NaN in one row ends that stream as a row fault; its neighbours, and whoever gets its slot
    next, say what they say alone."""
    for i in range(4):
        rig.say(ask(i, asked[i], SAID))
    while [(r.kind, r.batch) for r in rig.reports[-2:]] != [("decode", 4)] * 2:
        rig.turn()
    Faults(board.state).add(Fault("nan", "step", row=2))
    rig.drain()
    victims = [i for i in range(4) if rig.ends[i] == ["row_fault"]]
    assert len(victims) == 1
    assert all(rig.ids[i] == alone[i] for i in range(4) if i not in victims)
    for i in range(4, 8):
        rig.say(ask(i, asked[i], SAID))
    rig.drain()
    assert [rig.ids[i] for i in range(4, 8)] == alone[4:]


@BOTH
@pytest.mark.parametrize("kind", ["aicore-fault", "lost"])
def test_a_broken_device_ends_the_worker(rig: Rig, board: TwinBoard, kind: str) -> None:
    """An AI Core exception or a lost device is fatal, and says which call failed with what."""
    Faults(board.state).add(Fault(kind, "step" if kind != "lost" else "call"))  # type: ignore[arg-type]
    rig.say(ask(1, [1, 2, 3], SAID))
    with pytest.raises(FatalDeviceError, match=r"failed with 5070\d\d RT_") as caught:
        rig.drain()
    assert not isinstance(caught.value, StepError | MemoryError)
    board.device.acl._process.sticky = None  # as a new process would find it


def test_a_hang_is_fatal_when_the_wait_is_over(
    rig: Rig, board: TwinBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that does not end: the wait does, as a fatal error naming the time-out."""
    wait = board.device.synchronize
    monkeypatch.setattr(board.device, "synchronize", lambda: wait(0.05))
    Faults(board.state).add(Fault("hang", "step", seconds=0.5))
    rig.say(ask(1, [1, 2, 3], SAID))
    with pytest.raises(FatalDeviceError, match="507046 RT_STREAM_SYNC_TIMEOUT"):
        rig.drain()
    monkeypatch.undo()
    board.device.synchronize()


# --- what does not fit ---------------------------------------------------------------------------


def test_a_model_without_gears_says_so(board: TwinBoard, tiny: Path) -> None:
    """model.json must list the gears the .om was compiled for."""
    spec = dataclasses.replace(om_spec(tiny), gears=())
    with pytest.raises(ContractError, match="lists no gears"):
        OmExecutor(spec, SLOTS, board.device)


def test_an_om_that_lacks_a_promised_gear_says_so(board: TwinBoard, tiny: Path) -> None:
    """A gear of model.json that is not in the .om is named, and nothing stays allocated."""
    free = board.device.memory()
    spec = om_spec(tiny)
    promised = (*spec.gears, (3, 1, 64), (3, 1, 160))
    with pytest.raises(ContractError, match=r"lacks the gears .*\(3, 1, 64\)"):
        OmExecutor(dataclasses.replace(spec, gears=promised), SLOTS, board.device)
    assert board.device.memory() == free


def test_an_om_of_another_model_says_so(board: TwinBoard, tiny: Path) -> None:
    """Other sizes in model.json than in the .om are a contract error naming the tensor."""
    spec = dataclasses.replace(om_spec(tiny), vocab=om_spec(tiny).vocab + 1)
    with pytest.raises(ContractError, match="logits"):
        OmExecutor(spec, SLOTS, board.device)


def test_a_file_that_is_no_model_says_so(board: TwinBoard, tiny: Path, tmp_path: Path) -> None:
    """Noise, an empty and a missing .om are contract errors naming the file."""
    spec = dataclasses.replace(om_spec(tiny), folder=tmp_path)
    for content in (b"\x00" * 5000, b"", None):
        if content is None:
            (tmp_path / "model.om").unlink()
        else:
            (tmp_path / "model.om").write_bytes(content)
        with pytest.raises(ContractError, match=r"model\.om"):
            OmExecutor(spec, SLOTS, board.device)


def test_the_context_offered_is_the_longest_gear(tiny: Path) -> None:
    """A worker on an .om offers no more context than was compiled, or than was asked for."""
    assert om_spec(tiny).context_tokens == 160
    assert om_spec(tiny, 100).context_tokens == 100
    assert om_spec(tiny, 5000).context_tokens == 160
    assert read_spec(tiny).context_tokens == 256


# --- the real model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in fp32: the plain graph, and its .om beside it."""
    from reference import demo_gguf

    from edged.export.form import Form
    from edged.export.run import export
    from edged.twin import om

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    export(demo_gguf(), folder, Form("fp32", "onnx"), hide_bar=True)
    shapes = [(b, 1, s) for b in (1, 4) for s in (256, 512)] + [(1, 64, s) for s in (256, 512)]
    om.pack_decoder(folder, folder / "model.om", shapes)
    about = json.loads((folder / "model.json").read_text()) | {"gears": shapes}
    (folder / "model.json").write_text(json.dumps(about))
    return folder


@pytest.mark.model
@BOTH
def test_smollm2_through_the_twin_says_the_cpu_engines_tokens(
    board: TwinBoard, smollm2: Path
) -> None:
    """The demo model in fp32, export to .om to twin: the very ids of the plain driver."""
    from reference import Driver, chat_prompts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    asked = [tokenizer.encode(text).ids for text in chat_prompts()[:4]]
    driver = Driver(smollm2, context=512)
    expected = [driver.generate(prompt, 16) for prompt in asked]
    with twin_rig(board, smollm2) as rig:
        rig.say(wire.SetLimits(SLOTS, 1.0, 64, True))
        for i, prompt in enumerate(asked):
            rig.say(ask(i, prompt, 16))
        rig.drain()
        assert [rig.ids.get(i, []) for i in range(4)] == expected
