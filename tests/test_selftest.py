"""The golden self test: wrong output keeps an engine out and says so, and a test costs nobody."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fakes_om import CHUNK, SLOTS, TwinBoard, om_spec, prompts, tiny_model
from fakes_twin import make_board
from fakes_worker import FakeExecutor, Rig, ask, fake_spec, solo_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_process import daemon
from tiny import Tiny

from edged import wire
from edged.core import Limits
from edged.export.form import Form
from edged.export.run import export
from edged.twin.faults import Fault, Faults
from edged.worker import selftest
from edged.worker.contract import ContractError, read_spec
from edged.worker.executor import Batch, Executor
from edged.worker.om.executor import OmExecutor
from edged.worker.ort import OrtExecutor
from edged.worker.plan import Gears
from edged.worker.reference import Golden, Store
from edged.worker.selftest import SelfTester, SelfTestError, prove


def library() -> str:
    return "runtime 1"


def launch(folder: Path, golden_dir: str = "", slots: int = SLOTS) -> wire.Launch:
    return wire.Launch("cpu", str(folder), slots, 0, 1, CHUNK, golden_dir)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model with a golden answer, as a plain graph and as an .om."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as onnxruntime's own flavour, which writes into the cache itself."""
    folder = tmp_path_factory.mktemp("models")
    source = Tiny(seed=5).write_gguf(folder / "tiny.gguf")
    export(source, folder / "tiny", Form("fp32", "cpu"), hide_bar=True)
    return folder / "tiny"


@pytest.fixture
def bare(tiny: Path, tmp_path: Path) -> Path:
    """The same model without a golden answer."""
    return altered(tiny, tmp_path / "bare", golden=None)


def altered(tiny: Path, folder: Path, **about: object) -> Path:
    """A copy with entries of model.json replaced."""
    shutil.copytree(tiny, folder)
    found = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(found | about))
    return folder


def golden_of(folder: Path) -> dict[str, list[object]]:
    found: dict[str, list[object]] = json.loads((folder / "model.json").read_text())["golden"]
    return found


@pytest.fixture
def executor(tiny: Path) -> Iterator[OrtExecutor]:
    with closing(OrtExecutor(read_spec(tiny), SLOTS, 1)) as made:
        yield made


class Bent:
    """A real executor whose logits are bent before anybody sees them, as a broken kernel would."""

    def __init__(self, executor: OrtExecutor) -> None:
        self._executor = executor
        self.gears: Gears = executor.gears
        self.bend = lambda logits, tokens: logits
        self.shapes: list[tuple[int, int]] = []

    @property
    def context(self) -> int:
        return self._executor.context

    def run(self, batch: Batch) -> np.ndarray:
        self.shapes.append(batch.shape)
        return self.bend(self._executor.run(batch), batch.shape[1])

    def repack(self, context: int, rows: Sequence[int]) -> None:
        self._executor.repack(context, rows)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._executor.copy_rows(source, target, rows)

    def zero_slot(self, slot: int) -> None:
        self._executor.zero_slot(slot)

    def close(self) -> None:
        self._executor.close()


@pytest.fixture
def bent(executor: OrtExecutor) -> Bent:
    return Bent(executor)


def proved(executor: Executor, folder: Path, golden_dir: str = "") -> SelfTester:
    return prove(executor, read_spec(folder), launch(folder, golden_dir), library)


# --- before READY ------------------------------------------------------------------------------


def test_a_sound_engine_passes_in_the_shapes_of_real_streams(bent: Bent, tiny: Path) -> None:
    """Two chunks of the prompt, then decode steps from the narrowest to the widest batch."""
    proved(bent, tiny)
    chunks = [tokens for batch, tokens in bent.shapes if tokens > 1]
    widths = {batch for batch, tokens in bent.shapes if tokens == 1}
    assert len(chunks) >= 2
    assert {1, SLOTS} <= widths


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda x, t: np.full_like(x, np.nan), "not finite"),
        (lambda x, t: np.full_like(x, 3.25), "all logits are the same"),
        (lambda x, t: -x, "the likeliest id is"),
        (lambda x, t: np.roll(x, 1, axis=1), "the likeliest id is"),
        (lambda x, t: 6 * x, "log probability"),
        (lambda x, t: x if t > 1 else np.roll(x, 1, axis=1), "at token 2 of 4"),
    ],
    ids=["nan", "flat", "negated", "shifted", "too sure", "only decode"],
)
def test_wrong_output_is_refused_and_told(bent: Bent, tiny: Path, bend: object, words: str) -> None:
    """Whatever is wrong with the numbers, the engine is refused with where and what differs."""
    bent.bend = bend  # type: ignore[assignment]
    with pytest.raises(SelfTestError, match=words) as told:
        proved(bent, tiny)
    assert "model.onnx" in str(told.value)


def test_a_cache_that_mixes_slots_is_found(executor: OrtExecutor, tiny: Path) -> None:
    """Rows that land in the wrong slot change what is said after them."""
    bent = Bent(executor)

    def spoil(logits: np.ndarray, tokens: int) -> np.ndarray:
        executor.zero_slot(0)
        return logits

    bent.bend = spoil
    with pytest.raises(SelfTestError):
        proved(bent, tiny)


def test_a_model_without_an_answer_is_held_to_its_first_start(
    bent: Bent, bare: Path, tmp_path: Path
) -> None:
    """Recorded once, compared from then on; another version of the library begins anew."""
    folder = tmp_path / "state" / "golden"
    proved(bent, bare, str(folder))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    proved(bent, bare, str(folder))
    assert (list(folder.iterdir()), file.read_bytes()) == ([file], content)
    bent.bend = lambda logits, tokens: np.roll(logits, 1, axis=1)
    with pytest.raises(SelfTestError, match="likeliest"):
        proved(bent, bare, str(folder))
    spec = read_spec(bare)
    prove(bent, spec, launch(bare, str(folder)), lambda: "runtime 2")
    assert len(list(folder.iterdir())) == 2


def test_a_changed_graph_is_another_record(bare: Path, tmp_path: Path) -> None:
    """New weights under the same name are not held to the old ones' answer."""
    golden = Golden([1, 2], [3], [[(3, -0.5)]])
    Store(tmp_path / "g", read_spec(bare), "runtime").write(golden)
    assert Store(tmp_path / "g", read_spec(bare), "runtime").read() == golden
    data = next(bare.glob("model.onnx.data*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    assert Store(tmp_path / "g", read_spec(bare), "runtime").read() is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"prompt_ids":[99999],"tokens":[1],"top_logprobs":[[[1,-1.0]]]}']
)
def test_a_damaged_record_is_made_anew(
    executor: OrtExecutor, bare: Path, tmp_path: Path, content: bytes
) -> None:
    """A file that cannot be used is replaced, not fatal."""
    proved(executor, bare, str(tmp_path / "g"))
    (file,) = (tmp_path / "g").iterdir()
    sound = file.read_bytes()
    file.write_bytes(content)
    proved(executor, bare, str(tmp_path / "g"))
    assert file.read_bytes() == sound


def test_a_folder_that_cannot_be_written_stops_nobody(
    executor: OrtExecutor, bare: Path, tmp_path: Path
) -> None:
    """Without a record the engine serves all the same, and nothing is left lying about."""
    (tmp_path / "file").write_text("not a folder")
    proved(executor, bare, str(tmp_path / "file"))
    proved(executor, bare)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_no_more_than_32_records_are_kept(bare: Path, tmp_path: Path) -> None:
    """The state folder does not grow with every driver ever installed."""
    golden = Golden([1, 2], [3], [[(3, -0.5)]])
    for version in range(40):
        Store(tmp_path / "g", read_spec(bare), f"runtime {version}").write(golden)
    assert len(list((tmp_path / "g").iterdir())) == 32


def test_a_model_without_an_answer_must_still_say_something(bent: Bent, bare: Path) -> None:
    """NaN or flat logits are never recorded as what is right."""
    for value, words in ((np.nan, "not finite"), (0.0, "all logits are the same")):
        bent.bend = lambda logits, tokens, value=value: np.full_like(logits, value)
        with pytest.raises(SelfTestError, match=words):
            proved(bent, bare)


def test_a_golden_answer_that_makes_no_sense_is_a_fault_of_the_model(
    executor: OrtExecutor, tiny: Path, tmp_path: Path
) -> None:
    """It names the file and what to do, and is not taken for wrong output."""
    for i, broken in enumerate(({"tokens": []}, {"prompt_ids": [10**6]}, {"tokens": "x"})):
        folder = altered(tiny, tmp_path / str(i), golden=golden_of(tiny) | broken)
        with pytest.raises(ContractError, match=r"golden.*edged export"):
            proved(executor, folder)


def test_a_context_too_short_for_the_prompt_is_tested_with_a_shorter_one(tiny: Path) -> None:
    """Even a context of a few tokens is tested as far as it goes."""
    for context in (1, 2, 5, 20, 44):
        spec = read_spec(tiny, context)
        with closing(OrtExecutor(spec, 1, 1)) as executor:
            tester = prove(executor, spec, launch(tiny, slots=1), library)
            assert tester.run(0) == ""


def test_a_worker_with_wrong_weights_never_gets_ready(tiny: Path, tmp_path: Path) -> None:
    """A real worker whose weights were damaged on disk: Fault("self_test"), exit 1, no Ready."""
    folder = altered(tiny, tmp_path / "damaged")
    data = next(folder.glob("model.onnx.data*"))
    weights = np.frombuffer(data.read_bytes(), np.float32).copy()
    data.write_bytes(np.roll(weights, 64).tobytes())
    with daemon() as d:
        assert isinstance(d.hear(), wire.Hello)
        d.say(launch(folder))
        heard = d.until(lambda m: isinstance(m, wire.Fault))
        assert not any(isinstance(m, wire.Ready) for m in heard)
        fault = heard[-1]
        assert isinstance(fault, wire.Fault)
        assert (fault.kind, d.exit_code()) == ("self_test", 1), fault
        assert "after the golden prompt" in fault.detail


def test_nan_from_a_device_keeps_a_worker_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board that computes NaN: the worker says so and ends; a sound one serves again."""
    monkeypatch.setenv("EDGED_TWIN", str(make_board(tmp_path / "twin")))
    from edged.twin.state import TwinState

    with closing(TwinState(tmp_path / "twin")) as state:
        Faults(state).add(Fault("nan", "step", times=0))
        with daemon("npu") as d:
            assert isinstance(d.hear(), wire.Hello)
            d.say(launch(tiny))
            fault = d.until(lambda m: isinstance(m, wire.Fault))[-1]
            assert isinstance(fault, wire.Fault)
            assert (fault.kind, d.exit_code()) == ("self_test", 1)
            assert "not finite" in fault.detail
        Faults(state).clear()
        with daemon("npu") as d:
            d.launch(tiny, slots=SLOTS, prefill_chunk=CHUNK)
            assert len(d.answer(ask(1, [1, 2, 3], 8))) == 8


def test_a_worker_records_where_its_launch_says(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines: the folder of the launch holds the answer, and the next start agrees."""
    monkeypatch.setenv("EDGED_TWIN", str(make_board(tmp_path / "twin")))
    for engine in ("cpu", "npu"):
        folder = tmp_path / f"golden-{engine}"
        for _ in range(2):
            with daemon(engine) as d:
                d.launch(bare, str(folder), slots=SLOTS, prefill_chunk=CHUNK)
            assert len(list(folder.iterdir())) == 1


# --- while streams run -------------------------------------------------------------------------

RC, EP = 0, 1
SAID = 20


def said(rig: Rig, asked: Sequence[Sequence[int]], tests_at: Sequence[int]) -> dict[int, list[int]]:
    """All streams' tokens, while a self test is asked for at these turns."""
    for i, prompt in enumerate(asked):
        rig.say(ask(i, prompt, SAID, ignore_eos=True))
    for turn in range(400):
        if turn in tests_at:
            rig.say(wire.SelfTest())
        rig.turn()
        if not rig.busy and turn > max(tests_at, default=0):
            break
    return dict(rig.ids)


def answers(rig: Rig) -> list[wire.SelfTested]:
    return [m for m in rig.messages if isinstance(m, wire.SelfTested)]


TURNS = st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)


@settings(max_examples=12, deadline=None)
@given(st.booleans(), st.integers(1, SLOTS), TURNS)
def test_a_test_on_the_cpu_changes_no_neighbour(
    tiny: Path, in_place: Path, own: bool, streams: int, turns: list[int]
) -> None:
    """float32, greedy: with tests between any steps every stream says what it says without."""
    folder = in_place if own else tiny
    spec, limits = read_spec(folder), Limits(SLOTS, prefill_chunk=CHUNK)
    asked = prompts(streams, (5, 20, 33))
    found = []
    for tests_at in ([], turns):
        executor = OrtExecutor(spec, SLOTS, 1)
        tester = prove(executor, spec, launch(folder), library)
        with closing(executor), closing(Rig(executor, spec, limits, tester)) as rig:  # type: ignore[arg-type]
            found.append(said(rig, asked, tests_at))
            assert answers(rig) or not tests_at
            assert all(a.ok and a.ran for a in answers(rig))
            assert rig.reports[-1].free_slots == SLOTS
    assert found[0] == found[1]
    assert all(len(ids) == SAID for ids in found[0].values())


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([RC, EP]), st.integers(1, SLOTS), TURNS)
def test_a_test_on_the_twin_changes_no_neighbour(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path, mode: int, streams: int, turns: list[int]
) -> None:
    """The same on compiled models, in both run modes, and without a device allocation."""
    spec, limits = om_spec(tiny), Limits(SLOTS, prefill_chunk=CHUNK)
    asked = prompts(streams, (5, 20, 33))
    found = []
    for tests_at in ([], turns):
        board = TwinBoard(tmp_path_factory.mktemp("twin"), mode)
        executor = OmExecutor(spec, SLOTS, board.device)
        tester = prove(executor, spec, launch(tiny), library)
        before = board.allocations
        with closing(executor), closing(Rig(executor, spec, limits, tester)) as rig:  # type: ignore[arg-type]
            found.append(said(rig, asked, tests_at))
            assert all(a.ok and a.ran for a in answers(rig))
            assert answers(rig) or not tests_at
        assert board.allocations == before
        board.close()
    assert found[0] == found[1]


@pytest.fixture
def fake() -> Iterator[Rig]:
    """Two slots of the fake model, whose golden answer is its own."""
    spec, executor = fake_spec(), FakeExecutor(2, step_s=0.1)
    prompt = [3, 1, 4]
    likely = 5.0 - math.log(math.exp(5.0) + 96 * math.exp(0.5))
    tokens = solo_tokens(prompt, 5)
    golden = Golden(prompt, tokens, [[(t, likely), (0, -4.6), (1, -4.6)] for t in tokens])
    tester = SelfTester(executor, spec, 2, 4, golden)
    with closing(Rig(executor, spec, Limits(2, prefill_chunk=4), tester)) as made:
        yield made


def test_an_idle_worker_tests_at_once_under_a_deadline(fake: Rig) -> None:
    """A Phase promises the test, the answer tells its seconds, a last Phase says idle again."""
    fake.say(wire.SelfTest())
    promised, answer, after = fake.turn()
    assert isinstance(promised, wire.Phase) and promised.name == "self_test"
    assert promised.deadline_s >= 20
    assert isinstance(answer, wire.SelfTested)
    assert (answer.ok, answer.ran, answer.detail) == (True, True, "")
    assert answer.seconds == pytest.approx(0.1 * len(fake.executor.runs))
    assert isinstance(after, wire.Phase) and after.deadline_s == 0


def test_where_all_slots_are_busy_it_waits_for_the_first_that_is_free(fake: Rig) -> None:
    """It runs before the next stream can take that slot, and that stream is served after it."""
    fake.say(ask(1, [5, 6], 4, ignore_eos=True), ask(2, [8, 9], 30, ignore_eos=True))
    fake.turn(3)
    fake.say(wire.SelfTest())
    while 1 not in fake.ends:
        assert not answers(fake)
        fake.turn()
    assert len(answers(fake)) == 1
    fake.say(ask(3, [7, 7], 4, ignore_eos=True))
    fake.drain()
    assert fake.ends == {1: ["length"], 2: ["length"], 3: ["length"]}
    with_test = {k: list(v) for k, v in fake.ids.items()}
    again = Rig(FakeExecutor(2), fake_spec(), Limits(2, prefill_chunk=4))
    with closing(again):
        for stream, prompt, count in ((1, [5, 6], 4), (2, [8, 9], 30), (3, [7, 7], 4)):
            again.say(ask(stream, prompt, count, ignore_eos=True))
            again.drain()
        assert again.ids == with_test


@pytest.mark.parametrize("paused", [False, True])
def test_the_wait_has_an_end(fake: Rig, paused: bool) -> None:
    """No slot, or limits that let nothing run: after the bound it says that nothing was tested."""
    if paused:
        fake.say(wire.SetLimits(2, 0.0, 4, True))
        fake.turn()
    else:
        fake.say(ask(1, [5, 6], 60, ignore_eos=True), ask(2, [8, 9], 60, ignore_eos=True))
        fake.turn(3)
    fake.say(wire.SelfTest(), wire.SelfTest())
    fake.turn()
    assert not answers(fake)
    if paused:
        assert fake.loop._wait_s() == wire.SELF_TEST_WAIT_S
    fake.executor.now_s += wire.SELF_TEST_WAIT_S
    fake.turn()
    (answer,) = answers(fake)
    assert (answer.ok, answer.ran) == (True, False)
    assert "not tested" in answer.detail
    fake.turn()
    assert len(answers(fake)) == 1


def test_wrong_output_is_told_and_leaves_a_clean_slot(fake: Rig) -> None:
    """NaN in the test is no fault of a stream: the next one in that slot says the right thing."""
    fake.say(ask(1, [5, 6], 30, ignore_eos=True))
    fake.turn(3)
    fake.executor.poisoned.add(1)
    fake.say(wire.SelfTest())
    fake.turn()
    (answer,) = answers(fake)
    assert (answer.ok, answer.ran) == (False, True)
    assert "not finite" in answer.detail
    fake.say(ask(2, [3, 1, 4], 5))
    fake.drain()
    assert fake.ids[2] == solo_tokens([3, 1, 4], 5)
    assert fake.ends[1] == ["length"]


@pytest.mark.parametrize("mode", [RC, EP])
def test_what_a_failed_test_left_in_a_cache_reaches_nobody(
    tmp_path: Path, tiny: Path, mode: int
) -> None:
    """0 x NaN is NaN: streams shorter than the golden prompt are served in every slot after it."""
    spec, board = om_spec(tiny), TwinBoard(tmp_path / "twin", mode)
    executor = OmExecutor(spec, SLOTS, board.device)
    tester = prove(executor, spec, launch(tiny), library)
    rig = Rig(executor, spec, Limits(SLOTS, prefill_chunk=CHUNK), tester)  # type: ignore[arg-type]
    with closing(executor), closing(rig):
        Faults(board.state).add(Fault("nan", "step", after=2))
        rig.say(wire.SelfTest())
        rig.turn()
        assert [a.ok for a in answers(rig)] == [False]
        for i in range(SLOTS):
            rig.say(ask(i, [1, 2], 5))
        rig.drain()
        assert rig.ends == {i: ["length"] for i in range(SLOTS)}
    board.close()


def test_a_follow_up_never_reuses_the_rows_of_a_test(fake: Rig) -> None:
    """The slot a test ran in has forgotten what its last stream left there."""
    long = [(7 * k) % 50 for k in range(20)]
    for stream, prompt in ((1, long), (2, long[::-1])):  # both slots keep rows
        fake.say(ask(stream, prompt, 3, ignore_eos=True))
        fake.drain()
    fake.say(wire.SelfTest())
    fake.turn()
    for stream, prompt in ((3, [*long, 9]), (4, [*long[::-1], 9])):
        fake.say(ask(stream, prompt, 5))
        fake.drain()
        assert fake.ids[stream] == solo_tokens(prompt, 5)


def test_a_worker_process_answers_a_self_test_in_mid_stream(tiny: Path) -> None:
    """A real worker on a real socket: one answer while a stream runs, and the stream ends well."""
    with daemon() as d:
        d.launch(tiny, slots=SLOTS, prefill_chunk=CHUNK)
        alone = d.answer(ask(1, [1, 2, 3], 100))
        d.say(ask(2, [1, 2, 3], 100), wire.SelfTest())
        heard = d.until(lambda m: isinstance(m, wire.Report) and any(row.finish for row in m.rows))
        (tested,) = (m for m in heard if isinstance(m, wire.SelfTested))
        assert tested.ok and tested.ran
        ids = [i for m in heard if isinstance(m, wire.Report) for row in m.rows for i in row.ids]
        assert ids == alone


# --- the demo model ----------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["auto", "int8", "fp32"])
def test_the_demo_model_passes_with_margin(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is allowed would do, in every precision, and the test is short."""
    from reference import exported

    folder = exported(dtype)
    spec = read_spec(folder, 2048)
    monkeypatch.setattr(selftest, "MAX_LOGPROB_OFF", 0.25)
    with closing(OrtExecutor(spec, 4, 2)) as executor:
        asked = wire.Launch("cpu", str(folder), 4, 2048, 2, 64)
        prove(executor, spec, asked, library)
        started_s = time.monotonic()
        assert prove(executor, spec, asked, library).run(2) == ""
        print(f"{dtype}: two tests in {time.monotonic() - started_s:.2f} s")
        assert time.monotonic() - started_s < 10.0
