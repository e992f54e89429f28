"""The parts of the NPU executor: arena, cache, ports, binding and loading, each on the twin."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes_om import SHAPES, SLOTS, TwinBoard, om_spec, tiny_model
from fakes_twin import make_board
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.errors import EdgedError, EngineFault
from edged.worker.contract import ContractError, cache_names
from edged.worker.executor import DeviceFault
from edged.worker.om import OM_FILE, codes
from edged.worker.om.arena import Arena, layout
from edged.worker.om.binding import Device, Port, library
from edged.worker.om.cache import Cache, CacheShape, CardCache, NewRows, SharedCache, pieces
from edged.worker.om.codes import CallerError, FatalDeviceError, OutOfDeviceMemory, failure
from edged.worker.om.executor import OmExecutor
from edged.worker.om.load import available_bytes, mapped
from edged.worker.om.ports import match, usable_gears

RC, EP = 0, 1
BOTH = pytest.mark.parametrize("board", [RC, EP], ids=["rc", "ep"], indirect=True)


@pytest.fixture
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwinBoard]:
    made = TwinBoard(tmp_path / "twin", getattr(request, "param", RC))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


# --- arena ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_pieces_of_the_arena_keep_the_rules(sizes: list[int]) -> None:
    """Starts at multiples of 128, ALIGN_UP(n, 32) + 32 bytes each, no overlap, all inside."""
    found, total = layout({str(i): size for i, size in enumerate(sizes)})
    end = 0
    for i, size in enumerate(sizes):
        piece = found[str(i)]
        assert piece.size_bytes == size
        assert piece.offset % 128 == 0
        assert piece.offset >= end
        end = piece.offset + -(-size // 32) * 32 + 32
    assert end + 127 <= total + 127  # the base may move up to 127 bytes


@BOTH
def test_the_arena_is_one_allocation(board: TwinBoard) -> None:
    """However many buffers: one malloc, one free, and aligned although malloc is not."""
    before = board.allocations
    arena = Arena(board.device, {"a": 1, "b": 1000, "c": 4096})
    assert board.allocations == before + 1
    for name in "abc":
        assert arena.address(name) % 128 == 0
        arena.fill(name, 0)
    assert arena.used_bytes == 5097
    free = board.device.memory()[0]
    arena.close()
    assert board.device.memory()[0] > free


# --- cache ---------------------------------------------------------------------------------------

PLANES, HEADS, DIM, CACHE_SLOTS, TOKENS = 4, 2, 16, 3, 5
CONTEXTS = (8, 12, 20, 40)


class Reference:
    """What the cache must hold, as a list of rows per slot."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray]] = [[] for _ in range(CACHE_SLOTS)]
        self.context = CONTEXTS[0]


class Bench:
    """A cache of one kind on a board, with a buffer for new rows, and a way to look at it."""

    def __init__(self, board: TwinBoard) -> None:
        self.device = board.device
        self.shape = CacheShape(PLANES, CACHE_SLOTS, HEADS, DIM, np.dtype(np.float32))
        self.stride = CACHE_SLOTS * HEADS * TOKENS * DIM * 4 + 96
        sizes = {"cache": self.shape.size_bytes(CONTEXTS[-1]), "new": PLANES * self.stride}
        self.arena = Arena(self.device, sizes)
        self.cache: Cache
        if self.device.shared:
            memory, new = self.arena.view("cache"), self.arena.view("new")
            self.cache = SharedCache(self.shape, memory, new, CONTEXTS[0])
        else:
            self.arena.fill("cache", 0)
            address = self.arena.address("cache")
            self.cache = CardCache(self.shape, self.device, address, CONTEXTS[0])

    def put_new(self, values: np.ndarray, batch: int, tokens: int) -> NewRows:
        """values: [PLANES, batch, HEADS, tokens, DIM]."""
        for plane in range(PLANES):
            data = np.ascontiguousarray(values[plane])
            target = self.arena.address("new") + plane * self.stride
            self.device.copy(target, int(data.ctypes.data), data.nbytes, codes.HOST_TO_DEVICE)
        return NewRows(self.arena.address("new"), self.stride, batch, tokens)

    def look(self) -> np.ndarray:
        """[PLANES, CACHE_SLOTS, HEADS, S, DIM] as it is now."""
        self.device.synchronize()
        shape = (PLANES, CACHE_SLOTS, HEADS, self.cache.context, DIM)
        out = np.empty(shape, np.float32)
        source = self.arena.address("cache")
        self.device.copy(int(out.ctypes.data), source, out.nbytes, codes.DEVICE_TO_HOST)
        return out


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "copy", "zero", "repack"]),
        st.integers(0, CACHE_SLOTS - 1),
        st.integers(0, CACHE_SLOTS - 1),
        st.integers(1, TOKENS),
    ),
    max_size=25,
)


@pytest.fixture(scope="module", params=[RC, EP], ids=["rc", "ep"])
def bench_board(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwinBoard]:
    made = TwinBoard(tmp_path_factory.mktemp("twin") / "twin", request.param)
    yield made
    made.close()


@settings(max_examples=40, deadline=None)
@given(ACTIONS, st.integers(0, 2**32 - 1))
def test_caches_hold_exactly_the_rows_they_should(
    bench_board: TwinBoard, actions: list[tuple[str, int, int, int]], seed: int
) -> None:
    """Any order of appends, copies, zeroings and re-packs, on shared memory and on a card: the
    rows that count are the right ones, and what does not count is finite."""
    bench, model, rng = Bench(bench_board), Reference(), np.random.default_rng(seed)
    for action, slot, other, count in actions:
        rows = model.rows[slot]
        if action == "append" and len(rows) + count <= model.context:
            values = rng.normal(size=(PLANES, 2, HEADS, TOKENS, DIM)).astype(np.float32)
            new = bench.put_new(values, 2, TOKENS)
            bench.cache.append(new, 1, slot, len(rows), count)
            bench.device.synchronize()
            rows += [values[:, 1, :, i] for i in range(count)]
        elif action == "copy" and slot != other:
            bench.cache.copy_rows(slot, other, len(rows)) if rows else None
            model.rows[other] = list(rows)
        elif action == "zero":
            bench.cache.zero_slot(slot)
            model.rows[slot] = []
        elif action == "repack":
            wanted = CONTEXTS[count % len(CONTEXTS)]
            model.rows = [r[:wanted] for r in model.rows]
            bench.cache.repack(wanted, [len(r) for r in model.rows])
            model.context = wanted
    found = bench.look()
    for slot, rows in enumerate(model.rows):
        for i, row in enumerate(rows):
            assert (found[:, slot, :, i] == row).all()
    assert np.isfinite(found).all()
    bench.arena.close()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 60), st.integers(-70, 70))
def test_moving_pieces_is_a_memmove(size: int, shift: int) -> None:
    """The pieces of a move never overlap themselves, and together they move everything."""
    data = np.arange(300)
    expected = data.copy()
    expected[100 + shift : 100 + shift + size] = data[100 : 100 + size]
    for start, length in pieces(size, shift):
        assert length <= abs(shift)
        source = data[100 + start : 100 + start + length].copy()
        data[100 + shift + start : 100 + shift + start + length] = source
    assert (data == expected).all()


# --- ports ---------------------------------------------------------------------------------------


def compiled(
    folder: Path, name_in: str = "{}", name_out: str = "/Cast:0:{}"
) -> tuple[list[Port], list[Port], list[tuple[int, ...]]]:
    """Ports and gears as a library would list them for the tiny model."""
    spec = om_spec(folder)
    cache = [Port(name_in.format(p), "float32", (-1,), 64) for p, _ in cache_names(spec.layers)]
    small = [
        Port(name_in.format("input_ids"), "int32", (-1, -1), 64),
        Port(name_in.format("position_ids"), "int32", (-1, -1), 64),
        Port(name_in.format("past_len"), "int32", (-1, 1), 64),
        Port(name_in.format("logit_idx"), "int32", (-1,), 64),
        Port(name_in.format("kv_pos"), "int32", (-1,), 64),
    ]
    gears = Port(name_in.format(codes.DYNAMIC_TENSOR_NAME), "int64", (11,), 88)
    rows = [
        Port(name_out.format(n), "float32", (4, 2, 1, 16), 64) for _, n in cache_names(spec.layers)
    ]
    logits = Port(name_out.format("logits"), "float32", (4, spec.vocab), 64)
    dims = [(b, t, b, t, b, 1, b, s, *[b * 2 * s * 16] * 4) for b, t, s in SHAPES]
    return [*small, *cache, gears], [*rows, logits], dims


def test_ports_are_told_by_the_end_of_their_names(tiny: Path) -> None:
    """Rewritten names, in any order, find their graph tensors; so do the gears."""
    inputs, outputs, _ = compiled(tiny)
    turned = [(*[b * 2 * s * 16] * 4, s, b, b, 1, b, t, b, t) for b, t, s in SHAPES]
    found = match(om_spec(tiny), inputs[::-1], outputs[::-1], turned, SHAPES)
    assert found.inputs[-1] == "input_ids"
    assert found.shape_input == 0
    assert found.outputs[0] == "logits"
    assert set(found.dims) == set(SHAPES)


def test_without_names_order_and_shape_decide(tiny: Path) -> None:
    """A library that gives no names: the graph's order for inputs, the shape for the logits."""
    inputs, outputs, gears = compiled(tiny, "", "")
    outputs = [outputs[-1], *outputs[:-1]]
    found = match(om_spec(tiny), inputs, outputs, gears, SHAPES)
    assert found.inputs[:5] == ["input_ids", "position_ids", "past_len", "logit_idx", "kv_pos"]
    assert found.outputs == ["logits", "new_k.0", "new_v.0", "new_k.1", "new_v.1"]
    assert found.shape_input == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i, o, g: (i[:-1], o, g), "inputs"),
        (lambda i, o, g: ([dataclasses.replace(i[0], dtype="int64"), *i[1:]], o, g), "input_ids"),
        (lambda i, o, g: (i, [dataclasses.replace(o[0], dtype="float16"), *o[1:]], g), "new_k.0"),
        (lambda i, o, g: (i, [*o[:-1], dataclasses.replace(o[-1], dims=(4, 7))], g), "logits"),
        (lambda i, o, g: (i, o, g[:-1]), "lacks the gears"),
        (lambda i, o, g: (i, o, [(*g[0][:-4], 1, 1, 1, 1)]), "cache input"),
        (lambda i, o, g: (i, o, [g[0][:-1]]), "dims"),
    ],
)
def test_misfits_are_named(tiny: Path, change: Any, says: str) -> None:
    """What does not fit model.json is a contract error that names it."""
    with pytest.raises(ContractError, match=says):
        match(om_spec(tiny), *change(*compiled(tiny)), SHAPES)


def test_gears_need_a_whole_set() -> None:
    """Batch 1 and every combination must be there; more slots or context are not offered."""
    shapes = [(b, 1, s) for b in (1, 4, 8) for s in (256, 512)] + [(1, 64, 256), (1, 64, 512)]
    full = usable_gears(shapes, 8, 512)
    assert (full.batch, full.tokens, full.context) == ((1, 4, 8), (1, 64), (256, 512))
    assert usable_gears(shapes, 6, 300).batch == (1, 4)
    assert usable_gears(shapes, 6, 200).context == (256,)
    holes: list[Sequence[tuple[int, int, int]]] = [[], shapes[2:], shapes[:-1]]
    for some in holes:
        with pytest.raises(ContractError, match="gears"):
            usable_gears(some, 8, 512)


# --- binding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ret", "kind"),
    [(207001, OutOfDeviceMemory), (245000, OutOfDeviceMemory), (200000, OutOfDeviceMemory)]
    + [(ret, FatalDeviceError) for ret in (507010, 507014, 507015, 507046, 507899, 545601)]
    + [(ret, CallerError) for ret in (100000, 107002, 145003, 145013, 507008, 545001)],
)
def test_every_code_has_a_class(ret: int, kind: type[EdgedError]) -> None:
    """Out of memory, fatal, or ours; the text carries call, size, code, name and the library's
    own words."""
    error = failure("rt.malloc", ret, "EE1001: because", 64)
    assert type(error) is kind
    assert f"rt.malloc of 64 bytes failed with {ret} {error.name}" in str(error)
    assert "EE1001: because" in str(error)
    assert isinstance(error, MemoryError) == (kind is OutOfDeviceMemory)
    assert isinstance(error, DeviceFault) == (kind is FatalDeviceError)


@BOTH
def test_failures_of_the_library_become_exceptions(board: TwinBoard) -> None:
    """Too much memory, a bad free and a bad copy each raise their class with the cause."""
    device = board.device
    with pytest.raises(OutOfDeviceMemory, match=r"rt\.malloc of 1125899906842624 bytes"):
        device.malloc(1 << 50)
    with pytest.raises(CallerError, match=r"rt\.free .*107000 RT_PARAM_INVALID.*not allocated"):
        device.free(device.malloc(64) + 64)


@BOTH
def test_any_thread_may_call(board: TwinBoard) -> None:
    """The context is set where it is missing, so a second thread can allocate and copy."""
    found: list[int] = []

    def work() -> None:
        address = board.device.malloc(64)
        board.device.fill(address, 7, 64)
        out = np.empty(64, np.uint8)
        board.device.copy(int(out.ctypes.data), address, 64, codes.DEVICE_TO_HOST)
        found.append(int(out.sum()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert found == [64 * 7]


def test_without_the_vendors_module_the_message_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No `acl` on the path: source set_env.sh, or use the twin."""
    monkeypatch.delenv("EDGED_TWIN", raising=False)
    with pytest.raises(EngineFault, match=r"set_env\.sh.*--twin"):
        library()


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Device 3 of a board with one: the code, its name and a hint."""
    from edged.twin.acl import Library

    acl = Library(make_board(tmp_path / "twin"))
    with pytest.raises(CallerError, match=r"107001 RT_INVALID_DEVICEID.*npu-smi"):
        Device(acl, device=3)
    acl.finalize()


def test_no_other_module_speaks_to_the_library() -> None:
    """`acl` is imported in binding.py only, and nowhere by the twin."""
    root = Path(__file__).parent.parent / "edged" / "worker"
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("import acl" in text) == (path.name == "binding.py"), path


# --- loading -------------------------------------------------------------------------------------


class Refusing:
    """The library of a board that wants models in device memory, as its documentation says."""

    def __init__(self, mdl: Any, memory: Any) -> None:
        self._mdl, self._memory = mdl, memory
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mdl, name)

    def load_from_mem_with_mem(self, address: int, *rest: int) -> tuple[int, int]:
        if not self._memory.owns(address):
            self.refused += 1
            return 0, 145007
        found: tuple[int, int] = self._mdl.load_from_mem_with_mem(address, *rest)
        return found


def test_a_library_that_refuses_mappings_gets_device_memory(board: TwinBoard, tiny: Path) -> None:
    """The staged way loads the same model, and the staging memory is freed."""
    acl = board.device.acl
    acl.mdl = Refusing(acl.mdl, acl._process.memory)
    free = board.device.memory()[0]
    executor = OmExecutor(om_spec(tiny), SLOTS, board.device)
    assert acl.mdl.refused == 1
    held = free - board.device.memory()[0]
    executor.close()
    assert board.device.memory()[0] == free
    plain = OmExecutor(om_spec(tiny), SLOTS, board.device)
    assert free - board.device.memory()[0] == held
    plain.close()


def test_the_mapping_is_closed_after_the_load(board: TwinBoard, tiny: Path) -> None:
    """The file is mapped while it is loaded, and no longer."""
    maps = Path("/proc/self/maps")
    with mapped(board.device, tiny / OM_FILE) as om:
        assert str(tiny / OM_FILE) in maps.read_text()
        assert om.work_bytes > 0
        assert om.weight_bytes < om.size_bytes
    assert str(tiny / OM_FILE) not in maps.read_text()


def test_available_memory_is_read_from_meminfo() -> None:
    """MemAvailable in bytes."""
    text = "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:      42 kB\n"
    assert available_bytes(text) == 42 * 1024


_PEAK = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from edged.twin.acl import Library
from edged.worker.om.binding import Device
from edged.worker.om.load import load, mapped

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))) * 1024

device = Device(Library(Path({twin!r})))
import onnx, onnxruntime
before = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
work = device.malloc(1 << 20)
with mapped(device, Path({om!r})) as om:
    model = load(device, om, (work, 1 << 20))
    weights = om.weight_bytes
after = anonymous()  # the watcher looks every 2 ms: the end counts as a look of its own
print(max(peak, after) - before, after - before, weights)
"""


def test_loading_holds_the_weights_once(tmp_path: Path) -> None:
    """A model of 200 MB: while it loads, what the worker holds of memory that is not page cache
    stays under 1.2 times the weights."""
    import onnx
    from onnx import TensorProto, helper

    from edged.twin import om

    side, layers = 2048, 12
    rng = np.random.default_rng(0)
    tensors, nodes, last = [], [], "x"
    for i in range(layers):
        weights = rng.normal(size=(side, side)).astype(np.float32)
        tensors.append(
            helper.make_tensor(
                f"w{i}", TensorProto.FLOAT, (side, side), weights.tobytes(), raw=True
            )
        )
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"y{i}"], name=f"n{i}"))
        last = f"y{i}"
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", side]) for n in ("x", last)]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    path = tmp_path / "big.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="big.data")
    om.pack(path, tmp_path / "big.om", [{"B": 1}, {"B": 2}], work_bytes=1 << 20)
    code = _PEAK.format(
        tests=str(Path(__file__).parent),
        twin=str(make_board(tmp_path / "twin")),
        om=str(tmp_path / "big.om"),
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert run.returncode == 0, run.stderr
    peak, after, held = map(int, run.stdout.split())
    assert held == side * side * 4 * layers
    assert 0.9 * held < after <= peak < 1.2 * held
