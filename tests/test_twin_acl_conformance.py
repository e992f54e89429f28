"""The simulated library against the public facts about pyACL on 310B and 310P, row by row."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes_twin import (
    D2D,
    H2D,
    HUGE_FIRST,
    HUGE_ONLY,
    NORMAL_ONLY,
    ROW_BYTES,
    WIDTH,
    Doubler,
    Session,
    done,
    doubler,
    make_board,
    session,
)

from edged.twin.acl import Library
from edged.twin.faults import Fault

RC, EP = 0, 1
X = np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)


@pytest.fixture(params=[RC, EP], ids=["rc", "ep"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    """A ready process on a shared-memory board, and on a card."""
    with session(make_board(tmp_path / "twin", run_mode=request.param)) as made:
        yield made


@pytest.fixture
def rc(tmp_path: Path) -> Iterator[Session]:
    with session(make_board(tmp_path / "twin")) as made:
        yield made


@pytest.fixture
def model(rc: Session, tmp_path: Path) -> Doubler:
    return Doubler(rc, doubler(tmp_path))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Library]:
    """A process that has called nothing yet."""
    library = Library(make_board(tmp_path / "twin"))
    yield library
    library.finalize()


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(30)
    return found[0]


# --- how calls behave ----------------------------------------------------------------------------


def test_no_constants_are_exported() -> None:
    """Nothing named like a constant exists in the module or its namespaces."""
    from edged.twin import acl

    for space in (acl, acl.rt, acl.mdl, acl.util):
        assert not [name for name in dir(space) if name.startswith("ACL") or name.isupper()]
    with pytest.raises(AttributeError):
        _ = acl.ACL_MEM_MALLOC_HUGE_FIRST


def test_keywords_and_wrong_arity_are_type_errors(both: Session) -> None:
    """Arguments are positional only and of exact number; everything else raises TypeError."""
    rt = both.acl.rt
    with pytest.raises(TypeError):
        rt.malloc(size=64, policy=0)
    with pytest.raises(TypeError):
        rt.malloc(64)
    with pytest.raises(TypeError):
        rt.malloc(64, 0, 0)
    with pytest.raises(TypeError):
        rt.malloc("64", 0)


def test_handles_and_pointers_are_plain_ints(both: Session) -> None:
    """Whatever the library hands out is an int, whatever it reports is an int."""
    acl = both.acl
    address, ret = acl.rt.malloc(64, HUGE_FIRST)
    handles = [both.context, both.stream, address, ret, acl.create_data_buffer(address, 64)]
    handles += [acl.mdl.create_desc(), acl.mdl.create_dataset(), done(acl.rt.create_event())]
    assert all(type(handle) is int for handle in handles)


def test_failures_are_codes_with_a_message(both: Session) -> None:
    """A failing call returns its code, and the text of the failure can be had once."""
    assert both.acl.rt.malloc(0, HUGE_FIRST) == (0, 100000)
    assert "size is 0" in both.acl.get_recent_err_msg()
    assert both.acl.get_recent_err_msg() is None


def test_messages_belong_to_their_thread(both: Session) -> None:
    """Another thread's failure is not this thread's recent message."""
    in_thread(lambda: both.acl.rt.malloc(0, HUGE_FIRST))
    assert both.acl.get_recent_err_msg() is None


def test_a_path_must_be_a_str(rc: Session, tmp_path: Path) -> None:
    """pathlib.Path and bytes are TypeErrors, not paths."""
    path = doubler(tmp_path)
    for wrong in (path, bytes(path)):
        with pytest.raises(TypeError):
            rc.acl.mdl.load_from_file(wrong)
        with pytest.raises(TypeError):
            rc.acl.mdl.query_size(wrong)


def test_bytes_to_ptr_takes_bytes_only(rc: Session) -> None:
    """bytearray and memoryview are ValueErrors."""
    assert rc.acl.util.ptr_to_bytes(rc.acl.util.bytes_to_ptr(b"abc"), 3) == b"abc"
    for wrong in (bytearray(b"abc"), memoryview(b"abc")):
        with pytest.raises(ValueError, match="bytes"):
            rc.acl.util.bytes_to_ptr(wrong)


def test_stop_thread_raises_what_the_thread_raised(rc: Session) -> None:
    """The one call that raises RuntimeError: joining a thread whose function failed."""
    seen: list[Any] = []
    tid = done(rc.acl.util.start_thread(seen.append, [1, 2]))
    assert rc.acl.util.stop_thread(tid) == 0
    assert seen == [[1, 2]]
    tid = done(rc.acl.util.start_thread(lambda arguments: 1 / 0, []))
    with pytest.raises(RuntimeError, match="division"):
        rc.acl.util.stop_thread(tid)


# --- life of the process -------------------------------------------------------------------------


def test_calls_before_init(fresh: Library) -> None:
    """Before init the runtime knows no context (107002) and models are not initialised (100001)."""
    acl = fresh
    assert acl.rt.malloc(64, HUGE_FIRST) == (0, 107002)
    assert acl.rt.create_stream() == (0, 107002)
    assert acl.mdl.load_from_file("x.om") == (0, 100001)
    assert acl.get_soc_name() is None


def test_calls_between_init_and_set_device(fresh: Library) -> None:
    """After init alone there is still no context: 107002."""
    acl = fresh
    assert acl.init() == 0
    assert acl.rt.malloc(64, HUGE_FIRST) == (0, 107002)
    assert acl.rt.get_mem_info(1) == (0, 0, 107002)
    assert acl.mdl.execute(1, 0, 0) == 107002


def test_second_init_and_finalize(fresh: Library) -> None:
    """A second init is 100002, a second finalize 100037, and there is no way back."""
    acl = fresh
    assert [acl.init(), acl.init(), acl.finalize(), acl.finalize()] == [0, 100002, 0, 100037]
    assert acl.init() == 100002


def test_unknown_device(fresh: Library) -> None:
    """set_device of a device that is not there is 107001."""
    acl = fresh
    assert acl.init() == 0
    assert acl.rt.get_device_count() == (1, 0)
    assert [acl.rt.set_device(1), acl.rt.set_device(-1)] == [107001, 107001]
    assert acl.rt.create_context(7) == (0, 107001)


def test_device_use_is_counted(fresh: Library) -> None:
    """Memory goes with the last reset_device, not before."""
    acl = fresh
    acl.init()
    assert [acl.rt.set_device(0), acl.rt.set_device(0), acl.rt.reset_device(0)] == [0, 0, 0]
    assert acl.rt.malloc(64, HUGE_FIRST)[1] == 0
    assert acl.rt.reset_device(0) == 0
    assert acl.rt.malloc(64, HUGE_FIRST) == (0, 107002)
    assert acl.rt.reset_device(0) == 107001


def test_soc_and_run_mode_are_the_boards(tmp_path: Path) -> None:
    """310B boards run RC (0), 310P cards EP (1); the full SoC name comes without a ret."""
    for board, soc, mode in (("310b4", "Ascend310B4", RC), ("310p3", "Ascend310P3", EP)):
        with session(make_board(tmp_path / board, board)) as made:
            assert made.acl.get_soc_name() == soc
            assert made.acl.rt.get_run_mode() == (mode, 0)


def test_unsupported_calls_say_so(both: Session) -> None:
    """What 310B and 310P do not offer returns 207000."""
    rt = both.acl.rt
    assert rt.host_register(1 << 20, 4096, 0) == (0, 207000)
    assert rt.stream_abort(both.stream) == 207000
    assert rt.device_task_abort(0, 100) == 207000


# --- contexts and threads ------------------------------------------------------------------------


def test_a_thread_without_context_gets_107002(rc: Session, model: Doubler) -> None:
    """malloc, memcpy and execute fail in another thread until it sets a context."""
    acl = rc.acl

    def attempt() -> list[int]:
        copy = acl.rt.memcpy(model.y, ROW_BYTES, model.x, ROW_BYTES, D2D)
        run = acl.mdl.execute(model.id, model.inputs, model.outputs)
        return [acl.rt.malloc(64, HUGE_FIRST)[1], copy, run]

    assert in_thread(attempt) == [107002] * 3
    assert in_thread(lambda: [acl.rt.set_context(rc.context), *attempt()]) == [0] * 4


def test_set_device_gives_a_thread_the_default_context(rc: Session) -> None:
    """A thread that only called set_device may allocate."""
    acl = rc.acl
    assert in_thread(lambda: (acl.rt.set_device(0), acl.rt.malloc(64, HUGE_FIRST)[1])) == (0, 0)


def test_streams_and_models_belong_to_a_context(rc: Session, model: Doubler) -> None:
    """A stream of another context is 107003, a model of another 107004."""
    acl = rc.acl
    done(acl.rt.create_context(0))
    assert acl.rt.synchronize_stream(rc.stream) == 107003
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 107004


def test_a_destroyed_context_is_gone(rc: Session) -> None:
    """The thread that still has it set gets 107002."""
    assert rc.acl.rt.destroy_context(rc.context) == 0
    assert rc.acl.rt.malloc(64, HUGE_FIRST) == (0, 107002)


# --- memory --------------------------------------------------------------------------------------


def test_malloc_of_nothing_is_refused(both: Session) -> None:
    """Size 0 is 100000, not a null pointer with success."""
    assert both.acl.rt.malloc(0, HUGE_FIRST) == (0, 100000)


def test_malloc_too_large_is_207001(both: Session) -> None:
    """More than the device has: (0, 207001), whatever the policy, and nothing is lost."""
    free, total, _ = both.acl.rt.get_mem_info(1)
    for policy in (HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY):
        assert both.acl.rt.malloc(total + 1, policy) == (0, 207001)
    assert both.acl.rt.get_mem_info(1) == (free, total, 0)


def test_huge_only_without_huge_pages_is_207001(tmp_path: Path) -> None:
    """When small blocks have split the last huge pages, HUGE_ONLY fails and HUGE_FIRST goes on."""
    with session(make_board(tmp_path / "twin")) as made:
        _, total, _ = made.acl.rt.get_mem_info(0)
        left = 12 << 20
        done(made.acl.rt.malloc(total - left, HUGE_ONLY))
        blocks = [made.malloc(256 << 10) for _ in range(36)]
        for block in blocks[::2]:
            assert made.acl.rt.free(block) == 0
        assert made.acl.rt.malloc(4 << 20, HUGE_ONLY) == (0, 207001)
        assert made.acl.rt.malloc(4 << 20, HUGE_FIRST)[1] == 0


def test_starts_are_aligned_to_64_and_to_no_more(both: Session) -> None:
    """A start is a multiple of 64, and nobody may count on more."""
    starts = [both.malloc(size) for size in (1, 64, 4096, 1 << 20, 3 << 20)]
    assert {start % 64 for start in starts} == {0}
    assert {start % 128 for start in starts} == {64}


def test_sizes_are_padded(rc: Session) -> None:
    """ALIGN_UP(size, 32) + 32: 4 KiB minus the pad and the offset still take one page."""
    free = rc.acl.rt.get_mem_info(0)[0]
    rc.malloc(4096 - 32 - 64)
    assert free - rc.acl.rt.get_mem_info(0)[0] == 4096
    rc.malloc(4096 - 32 - 63)
    assert free - rc.acl.rt.get_mem_info(0)[0] == 4096 + 8192


def test_memory_is_not_cleaned(both: Session) -> None:
    """New memory holds neither zeros nor what was there before, even where it is used again."""
    address = both.malloc(4096)
    first = both.get(address, np.empty(4096, np.uint8))
    assert first.all()
    assert both.acl.rt.memset(address, 4096, 0, 4096) == 0
    assert both.acl.rt.free(address) == 0
    again = both.malloc(4096)
    assert both.get(again, np.empty(4096, np.uint8)).all()


def test_use_after_free_is_noticed(both: Session) -> None:
    """Copies from and to freed memory, and a second free, are 107000."""
    address, other = both.malloc(4096), both.malloc(4096)
    rt = both.acl.rt
    assert rt.free(address) == 0
    assert rt.memcpy(other, 4096, address, 64, D2D) == 107000
    assert rt.memcpy(address, 4096, other, 64, D2D) == 107000
    assert rt.memset(address, 4096, 0, 64) == 107000
    assert rt.free(address) == 107000
    assert rt.free(0) == 107000


def test_freed_addresses_are_not_reused_at_once(both: Session) -> None:
    """A stale pointer does not silently mean the next allocation."""
    address = both.malloc(4096)
    assert both.acl.rt.free(address) == 0
    assert address not in {both.malloc(4096) for _ in range(50)}


def test_copies_out_of_range_are_refused(both: Session) -> None:
    """More bytes than the destination holds, or past either end of a buffer: 107000."""
    small, large = both.malloc(64), both.malloc(4096)
    rt = both.acl.rt
    assert rt.memcpy(large, 32, small, 64, D2D) == 107000
    assert rt.memcpy(small, 128, large, 128, D2D) == 107000
    assert rt.memcpy(large, 4096, small, 128, D2D) == 107000
    assert rt.memcpy(large + 4032, 128, small, 128, D2D) == 107000
    assert rt.memcpy(0, 64, small, 64, D2D) == 107000
    assert rt.memcpy(large, 4096, small, 64, D2D) == 0


def test_bytes_survive_all_directions(both: Session) -> None:
    """Host to device, device to device and back gives the same bytes, whatever the kind says."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    a, b = both.malloc(data.nbytes), both.malloc(data.nbytes)
    both.put(a, data)
    assert both.acl.rt.memcpy(b, data.nbytes, a, data.nbytes, H2D) == 0  # the kind is advisory
    assert (both.get(b, data) == data).all()


def test_asynchronous_copies_happen_in_order(both: Session) -> None:
    """What a stream copies is there after synchronising, in the order queued."""
    rt = both.acl.rt
    a, b = both.malloc(64), both.malloc(64)
    assert rt.memset_async(a, 64, 7, 64, both.stream) == 0
    assert rt.memcpy_async(b, 64, a, 64, D2D, both.stream) == 0
    assert rt.synchronize_stream_with_timeout(both.stream, 5000) == 0
    assert (both.get(b, np.empty(64, np.uint8)) == 7).all()


def test_host_to_host_is_not_asynchronous_on_a_card(tmp_path: Path) -> None:
    """memcpy_async of kind host to host: 207000 on EP."""
    with session(make_board(tmp_path / "twin", "310p3")) as made:
        a, b = done(made.acl.rt.malloc_host(64)), done(made.acl.rt.malloc_host(64))
        assert made.acl.rt.memcpy_async(a, 64, b, 64, 0, made.stream) == 207000


def test_numpy_may_view_device_memory_on_a_shared_board(rc: Session) -> None:
    """RC: a view of a malloc'd pointer reads and writes what the device sees."""
    address = rc.malloc(64)
    view = rc.acl.util.ptr_to_numpy(address, (16,), 11)
    view[:] = 1.5
    assert (rc.get(address, np.empty(16, np.float32)) == 1.5).all()
    assert rc.acl.rt.memset(address, 64, 0, 64) == 0
    assert not view.any()


_TOUCH = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes_twin import HUGE_FIRST, Session
made = Session(Path({twin!r}))
address = made.malloc(4096)
if {free}:
    assert made.acl.rt.free(address) == 0
print("touching", flush=True)
ctypes.c_uint8.from_address(address).value
print("survived")
"""


def touch(folder: Path, free: bool) -> subprocess.CompletedProcess[str]:
    """A child process that dereferences a device pointer."""
    code = _TOUCH.format(tests=str(Path(__file__).parent), twin=str(folder), free=free)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_dereferencing_a_cards_pointer_crashes(tmp_path: Path) -> None:
    """EP: touching device memory from the host ends the process with SIGSEGV."""
    ended = touch(make_board(tmp_path / "twin", run_mode=EP), free=False)
    assert (ended.stdout, ended.returncode) == ("touching\n", -11)


def test_dereferencing_freed_memory_crashes(tmp_path: Path) -> None:
    """RC: a live pointer may be touched, a freed one crashes."""
    folder = make_board(tmp_path / "twin")
    assert touch(folder, free=False).stdout == "touching\nsurvived\n"
    ended = touch(folder, free=True)
    assert (ended.stdout, ended.returncode) == ("touching\n", -11)


def test_memory_info_has_three_values_and_adds_up(both: Session) -> None:
    """(free, total, ret): what is allocated is missing, what is freed is back."""
    free, total, ret = both.acl.rt.get_mem_info(1)
    assert ret == 0
    assert free <= total
    address = both.malloc(64 << 20)
    held = free - both.acl.rt.get_mem_info(1)[0]
    assert 64 << 20 <= held <= 68 << 20
    assert both.acl.rt.free(address) == 0
    assert both.acl.rt.get_mem_info(1) == (free, total, 0)
    assert both.acl.rt.get_mem_info(99) == (0, 0, 107000)


# --- models --------------------------------------------------------------------------------------


def test_load_of_what_is_not_there(rc: Session, tmp_path: Path) -> None:
    """A missing path and an empty file are 145002."""
    (tmp_path / "empty.om").write_bytes(b"")
    for name in ("missing.om", "empty.om"):
        assert rc.acl.mdl.load_from_file(str(tmp_path / name)) == (0, 145002)
        assert rc.acl.mdl.query_size(str(tmp_path / name)) == (0, 0, 145002)


def test_load_of_damaged_bytes(rc: Session, tmp_path: Path) -> None:
    """Noise and a file cut short are 145006, from a path and from memory."""
    whole = doubler(tmp_path).read_bytes()
    for name, data in (("noise", b"\x00" * 4096), ("short", whole[:-1] if whole else b"")):
        path = tmp_path / f"{name}.om"
        path.write_bytes(data)
        assert rc.acl.mdl.load_from_file(str(path)) == (0, 145006)
        address = rc.acl.util.bytes_to_ptr(data)
        assert rc.acl.mdl.load_from_mem(address, len(data)) == (0, 145006)


def test_load_without_memory(rc: Session, tmp_path: Path) -> None:
    """Not enough device memory is 245000, and nothing stays allocated."""
    path = str(doubler(tmp_path))
    _, total, _ = rc.acl.rt.get_mem_info(0)
    hog = rc.malloc(total - (2 << 20), NORMAL_ONLY)
    rest = rc.malloc(rc.acl.rt.get_mem_info(0)[0] - 8192, NORMAL_ONLY)
    before = rc.acl.rt.get_mem_info(0)
    assert rc.acl.mdl.load_from_file(path) == (0, 245000)
    assert rc.acl.rt.get_mem_info(0) == before
    assert [rc.acl.rt.free(hog), rc.acl.rt.free(rest)] == [0, 0]
    assert rc.acl.mdl.load_from_file(path)[1] == 0


def test_load_for_another_chip(rc: Session, tmp_path: Path) -> None:
    """A model built for another SoC is 507008."""
    path = doubler(tmp_path, soc="Ascend310P3")
    assert rc.acl.mdl.load_from_file(str(path)) == (0, 507008)


def test_query_size_tells_what_load_takes(rc: Session, tmp_path: Path) -> None:
    """(work, weights, ret) before loading is what the load then holds; unload gives it back."""
    path = str(doubler(tmp_path))
    work, weights = done(rc.acl.mdl.query_size(path))
    free = rc.acl.rt.get_mem_info(0)[0]
    model_id = done(rc.acl.mdl.load_from_file(path))
    held = free - rc.acl.rt.get_mem_info(0)[0]
    assert work + weights <= held <= work + weights + 4 * 4096
    assert rc.acl.mdl.unload(model_id) == 0
    assert rc.acl.rt.get_mem_info(0)[0] == free


def test_load_from_memory_of_every_kind(both: Session, tmp_path: Path) -> None:
    """Host bytes and (where allowed) device memory load alike; work memory may be the caller's."""
    path = doubler(tmp_path)
    data, mdl = path.read_bytes(), both.acl.mdl
    host = both.acl.util.bytes_to_ptr(data)
    assert mdl.query_size_from_mem(host, len(data)) == mdl.query_size(str(path))
    assert mdl.load_from_mem(host, len(data))[1] == 0
    work_bytes, _ = done(mdl.query_size(str(path)))
    work = both.malloc(work_bytes)
    loaded = mdl.load_from_mem_with_mem(host, len(data), work, work_bytes, 0, 0)
    assert loaded[1] == 0
    assert mdl.load_from_mem_with_mem(host, len(data), work, 64, 0, 0) == (0, 145000)
    device = both.malloc(len(data))
    both.put(device, np.frombuffer(data, np.uint8))
    expected = 0 if both.acl.rt.get_run_mode()[0] == RC else 145007
    assert mdl.load_from_mem(device, len(data))[1] == expected


def test_unknown_model_ids(rc: Session, model: Doubler) -> None:
    """execute, unload and get_desc of an id that is not loaded are 145003."""
    mdl = rc.acl.mdl
    assert mdl.execute(99, model.inputs, model.outputs) == 145003
    assert mdl.unload(99) == 145003
    assert mdl.get_desc(model.desc, 99) == 145003
    assert [mdl.unload(model.id), mdl.unload(model.id)] == [0, 145003]


def test_descriptions(model: Doubler) -> None:
    """Names, types and dims without ret where pyACL gives none; open dims are -1."""
    mdl, desc = model.mdl, model.desc
    assert (mdl.get_num_inputs(desc), mdl.get_num_outputs(desc)) == (2, 1)
    assert mdl.get_input_name_by_index(desc, 0) == "x"
    assert mdl.get_input_dims(desc, 0) == ({"name": "x", "dimCount": 2, "dims": [-1, WIDTH]}, 0)
    assert mdl.get_input_size_by_index(desc, 0) == 4 * ROW_BYTES
    assert (mdl.get_input_data_type(desc, 0), mdl.get_input_format(desc, 0)) == (0, 2)
    assert mdl.get_input_dims(desc, 9) == ({}, 100000)


def test_output_names_are_rewritten(model: Doubler) -> None:
    """An output comes back as "<node>:<port>:<name>", so equality with its ONNX name fails."""
    name = model.mdl.get_output_name_by_index(model.desc, 0)
    assert name == "/Twice:0:y"
    assert model.mdl.get_output_index_by_name(model.desc, "y") == (0, 100000)
    assert model.mdl.get_output_index_by_name(model.desc, name) == (0, 0)


def test_gears_are_listed(model: Doubler) -> None:
    """The gear count is asked with index -1; each gear lists all dims of all inputs."""
    mdl, desc = model.mdl, model.desc
    assert mdl.get_input_dynamic_gear_count(desc, -1) == (3, 0)
    listed = done(mdl.get_input_dynamic_dims(desc, -1, 3))
    assert [gear["dims"] for gear in listed] == [[1, WIDTH], [4, WIDTH], [2, WIDTH]]
    assert mdl.get_input_dynamic_dims(desc, -1, 5000) == (None, 100000)
    assert mdl.get_dynamic_batch(desc) == ({"batchCount": 3, "batch": [1, 4, 2]}, 0)


# --- execution -----------------------------------------------------------------------------------


def test_execute_computes(both: Session, tmp_path: Path) -> None:
    """The graph really runs, on both kinds of board, at the gear that was set."""
    model = Doubler(both, doubler(tmp_path))
    both.put(model.x, X)
    for batch in (1, 2, 4):
        both.put(model.y, np.zeros_like(X))
        assert (model.run(batch) == 2 * X[:batch]).all()
        assert not model.rows()[batch:].any()
        dims = done(model.mdl.get_cur_output_dims(model.desc, 0))
        assert dims["dims"] == [batch, WIDTH]


def test_without_the_setter_the_largest_gear_runs(rc: Session, model: Doubler) -> None:
    """Never called: the model runs at its largest gear."""
    rc.put(model.x, X)
    assert model.mdl.execute(model.id, model.inputs, model.outputs) == 0
    assert (model.rows() == 2 * X).all()


def test_the_last_gear_stays_in_the_buffer(rc: Session, model: Doubler) -> None:
    """A later execute without a setter keeps the gear the buffer still holds."""
    rc.put(model.x, X)
    model.run(1)
    rc.put(model.y, np.zeros_like(X))
    assert model.mdl.execute(model.id, model.inputs, model.outputs) == 0
    assert model.rows()[0].all() == X[0].all()
    assert not model.rows()[1:].any()


def test_gears_are_checked(rc: Session, model: Doubler) -> None:
    """No gear 145013; wrong fixed dim or number of dims 145012; wrong index, 129 dims 100000."""
    mdl = model.mdl
    assert model.gear(3) == 145013

    def attempt(dims: list[int], index: int = model.setter) -> int:
        asked = {"name": "", "dimCount": len(dims), "dims": dims}
        return int(mdl.set_input_dynamic_dims(model.id, model.inputs, index, asked))

    assert attempt([4, WIDTH + 1]) == 145012
    assert attempt([4]) == 145012
    assert attempt([4, WIDTH], index=0) == 100000
    assert attempt([1] * 129) == 100000
    assert mdl.set_dynamic_batch_size(model.id, model.inputs, model.setter, 0) == 100000
    assert mdl.set_dynamic_batch_size(model.id, model.inputs, model.setter, 3) == 145013
    assert mdl.set_dynamic_batch_size(model.id, model.inputs, model.setter, 2) == 0


def test_the_gear_buffer_is_checked(rc: Session, model: Doubler) -> None:
    """A null buffer is 145011, one of less than 4 bytes 145012."""
    mdl = model.mdl
    dims = {"name": "", "dimCount": 2, "dims": [4, WIDTH]}
    for address, size, code in ((0, 8, 145011), (model.shape, 3, 145012), (model.shape, 4, 0)):
        inputs = rc.dataset((model.x, 4 * ROW_BYTES), (address, size))
        assert mdl.set_input_dynamic_dims(model.id, inputs, model.setter, dims) == code


def test_buffers_too_small_are_refused(rc: Session, model: Doubler) -> None:
    """A buffer shorter than the gear needs does not run silently, asynchronously or not."""
    assert model.gear(4) == 0
    shape = (model.shape, 8)
    short_in = rc.dataset((model.x, 4 * ROW_BYTES - 1), shape)
    short_out = rc.dataset((model.y, 4 * ROW_BYTES - 1))
    few = rc.dataset((model.x, 4 * ROW_BYTES))
    for inputs, outputs in (
        (short_in, model.outputs),
        (model.inputs, short_out),
        (few, model.outputs),
    ):
        assert model.mdl.execute(model.id, inputs, outputs) == 145000
        assert model.mdl.execute_async(model.id, inputs, outputs, rc.stream) == 145000
    assert model.gear(1) == 0
    assert model.mdl.execute(model.id, short_in, short_out) == 0


def test_a_buffer_claiming_more_than_it_is_gets_refused(rc: Session, model: Doubler) -> None:
    """The size in a data buffer does not make memory: 107000-class."""
    lying = rc.dataset((rc.malloc(64), 4 * ROW_BYTES), (model.shape, 8))
    assert model.gear(4) == 0
    assert model.mdl.execute_async(model.id, lying, model.outputs, rc.stream) == 107000


def test_a_null_output_is_allocated_by_the_library(rc: Session, tmp_path: Path) -> None:
    """Synchronous execute fills an output buffer of pointer 0 and size 0; the caller frees it."""
    model = Doubler(rc, doubler(tmp_path, gears=()))
    rc.put(model.x, X)
    buffer = rc.acl.create_data_buffer(0, 0)
    outputs = rc.acl.mdl.create_dataset()
    rc.acl.mdl.add_dataset_buffer(outputs, buffer)
    assert model.mdl.execute(model.id, model.inputs, outputs) == 0
    address = rc.acl.get_data_buffer_addr(buffer)
    assert (rc.get(address, X) == 2 * X).all()
    assert rc.acl.rt.free(address) == 0


def test_buffers_can_be_pointed_elsewhere(rc: Session, model: Doubler) -> None:
    """update_data_buffer moves an input without a new dataset."""
    other = rc.malloc(4 * ROW_BYTES)
    rc.put(model.x, X)
    rc.put(other, X + 1)
    assert (model.run() == 2 * X).all()
    buffer = rc.acl.mdl.get_dataset_buffer(model.inputs, 0)
    assert rc.acl.update_data_buffer(buffer, other, 4 * ROW_BYTES) == 0
    assert (model.run() == 2 * (X + 1)).all()


def test_execution_is_asynchronous(rc: Session, model: Doubler) -> None:
    """execute_async returns before the work is done; the wait ends with 507046 or with 0."""
    rt = rc.acl.rt
    rc.acl._process.state.command(time.monotonic(), {"time_scale": 100.0})
    assert model.gear(4) == 0
    assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 0
    assert rt.stream_query(rc.stream) == (1, 0)
    assert rt.synchronize_stream_with_timeout(rc.stream, 5) == 507046
    assert rt.synchronize_stream_with_timeout(rc.stream, 20000) == 0
    assert rt.stream_query(rc.stream) == (0, 0)
    assert rt.synchronize_stream_with_timeout(rc.stream, 0) == 107000


def test_events_mark_places_in_a_stream(rc: Session, model: Doubler) -> None:
    """Two events around an execute give its time; the two status calls are inverted."""
    rt = rc.acl.rt
    rc.acl._process.state.command(time.monotonic(), {"time_scale": 10.0})
    start, end = done(rt.create_event()), done(rt.create_event())
    assert rt.event_elapsed_time(start, end) == (0.0, 107006)
    assert rt.record_event(start, rc.stream) == 0
    assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 0
    assert rt.record_event(end, rc.stream) == 0
    assert rt.query_event(end) == (1, 0)
    assert rt.query_event_status(end) == (0, 0)
    assert rt.synchronize_event_with_timeout(end, 1) == 507047
    assert rt.synchronize_event_with_timeout(end, 20000) == 0
    assert rt.query_event_status(end) == (1, 0)
    assert done(rt.event_elapsed_time(start, end)) >= 30.0


def test_callbacks_need_a_subscriber(rc: Session) -> None:
    """A thread not subscribed gets 107012, an idle one 507012, time-out 0 is 100000; a launched
    callback gets its list as one argument."""
    rt, seen = rc.acl.rt, []
    assert rt.launch_callback(seen.append, [1], 1, rc.stream) == 107015
    rets: list[int] = []
    ready = threading.Event()

    def report(_: list[int]) -> None:
        rt.set_context(rc.context)
        rets.append(rt.process_report(10))
        ready.wait(10)
        rets.append(rt.process_report(0))
        rets.append(rt.process_report(10))
        while not seen:
            rt.process_report(1000)

    tid = done(rc.acl.util.start_thread(report, []))
    while not rets:
        pass
    assert rt.subscribe_report(tid, rc.stream) == 0
    ready.set()
    while len(rets) < 3:
        pass
    assert rt.launch_callback(seen.append, [1, 2], 1, rc.stream) == 0
    assert rt.synchronize_stream_with_timeout(rc.stream, 10000) == 0
    assert rc.acl.util.stop_thread(tid) == 0
    assert (rets, seen) == ([107012, 100000, 507012], [[1, 2]])


# --- faults --------------------------------------------------------------------------------------


def order(made: Session, fault: Fault) -> None:
    made.acl._process.faults.add(fault)


def test_an_aicore_fault_sticks(rc: Session, model: Doubler) -> None:
    """507015 comes at the synchronisation; everything in the process fails afterwards, and a new
    process works."""
    order(rc, Fault("aicore-fault", "step"))
    assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 0
    assert rc.acl.rt.synchronize_stream_with_timeout(rc.stream, 5000) == 507015
    assert rc.acl.rt.malloc(64, HUGE_FIRST) == (0, 507015)
    assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 507015
    assert rc.acl.rt.synchronize_stream_with_timeout(rc.stream, 5000) == 507015
    assert rc.acl.rt.query_device_status(0) == (1, 0)
    with session(rc.acl._process.state.folder) as other:
        assert other.acl.rt.malloc(64, HUGE_FIRST)[1] == 0


def test_a_hung_kernel_ends_at_the_op_timeout(rc: Session, model: Doubler) -> None:
    """The wait times out with 507046 while the kernel hangs; at the op time-out it is 507014."""
    assert rc.acl.rt.set_op_execute_time_out(1) == 0
    order(rc, Fault("hang", "step"))
    assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 0
    assert rc.acl.rt.synchronize_stream_with_timeout(rc.stream, 20) == 507046
    assert rc.acl.rt.synchronize_stream_with_timeout(rc.stream, 20000) == 507014
    assert rc.acl.rt.malloc(64, HUGE_FIRST) == (0, 507014)


def test_default_op_timeouts_are_long(tmp_path: Path) -> None:
    """Without set_op_execute_time_out a kernel may hang for 1,091 s (310B) or 547 s (310P)."""
    for board, seconds in (("310b4", 1091.0), ("310p3", 547.0)):
        with session(make_board(tmp_path / board, board)) as made:
            assert made.acl._process.op_timeout_s == seconds
            assert made.acl.rt.set_op_execute_time_out(0) == 0
            assert made.acl._process.op_timeout_s == seconds


def test_a_lost_device_answers_nothing(rc: Session) -> None:
    """507010 from the ordered call on, for every call that reaches the device."""
    address = rc.malloc(64)
    order(rc, Fault("lost", "call", after=2))
    assert rc.acl.rt.memset(address, 64, 0, 64) == 0
    assert rc.acl.rt.memset(address, 64, 0, 64) == 507010
    assert rc.acl.rt.malloc(64, HUGE_FIRST) == (0, 507010)
    assert rc.acl.rt.synchronize_stream(rc.stream) == 507010


def test_freeing_under_a_running_stream_faults_the_core(rc: Session, model: Doubler) -> None:
    """free does not wait: a task that then reads the memory is an AI Core exception."""
    order(rc, Fault("hang", "step", seconds=0.2))
    for _ in range(2):
        assert model.mdl.execute_async(model.id, model.inputs, model.outputs, rc.stream) == 0
    assert rc.acl.rt.free(model.x) == 0
    assert rc.acl.rt.synchronize_stream_with_timeout(rc.stream, 5000) == 507015


_HOLD = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes_twin import Doubler, Session
made = Session(Path({twin!r}))
model = Doubler(made, Path({om!r}))
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
def widest(call):
    ticks.clear()
    time.sleep(0.05)
    call()
    time.sleep(0.05)
    return max(b - a for a, b in zip(ticks, ticks[1:]))
def together():
    made.acl.mdl.execute_async(model.id, model.inputs, model.outputs, made.stream)
    made.acl.rt.synchronize_stream_with_timeout(made.stream, 60000)
print(widest(lambda: made.acl.mdl.execute(model.id, model.inputs, model.outputs)), widest(together))
"""


def test_a_synchronous_execute_can_keep_the_gil(tmp_path: Path) -> None:
    """On request execute freezes every Python thread of the process; waiting on a stream never
    does."""
    # 3 ms of modelled host time at 310B4, stretched to about 0.6 s.
    folder = make_board(tmp_path / "twin", hold_gil=1, time_scale=200)
    path = doubler(tmp_path)
    code = _HOLD.format(tests=str(Path(__file__).parent), twin=str(folder), om=str(path))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    frozen_s, free_s = map(float, run.stdout.split())
    assert frozen_s > 0.4
    assert free_s < 0.3
