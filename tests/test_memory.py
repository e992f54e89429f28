"""What a load is said to need, and when it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edged.engine.gate import Gate
from edged.memory import SPARE_BYTES, Admission, Memory, Needs, needs, pressed

MIB = 1 << 20


def model(folder: Path, graph: str = "model.onnx", weights: int = 10 * MIB, **more: object) -> Path:
    """An export without its content: a model of 2 layers whose cache row takes 4 KiB in fp32."""
    folder.mkdir(exist_ok=True)
    about = {"layers": 2, "kv_heads": 2, "head_dim": 128, "vocab": 1000, "context_tokens": 1024}
    (folder / "model.json").write_text(json.dumps({**about, "cache_dtype": "fp32", **more}))
    with (folder / graph).open("wb") as file:
        file.truncate(weights)
    return folder


def machine(folder: Path, available_mib: int, some: float = 0, full: float = 0) -> Memory:
    """A procfs that says so."""
    (folder / "pressure").mkdir(parents=True, exist_ok=True)
    (folder / "meminfo").write_text(
        f"MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
    )
    (folder / "pressure/memory").write_text(
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=0\n"
        f"full avg10={full:.2f} avg60=0.00 avg300=0.00 total=0\n"
    )
    (folder / "vmstat").write_text("nr_free_pages 1\noom_kill 3\noom_kill_x 9\n")
    return Memory(folder)


def test_the_sum_counts_weights_slots_and_loading(tmp_path: Path) -> None:
    """Weights from the size on disk, slots from the shapes in model.json, loading as a share."""
    (model(tmp_path) / "model.onnx.data").write_bytes(b"x" * MIB)
    found = needs("cpu", tmp_path, slots=4, context_tokens=512)
    assert found is not None
    assert found.resident_bytes == 11 * MIB + (64 << 20)
    assert found.arena_bytes == 4 * 512 * 4096 + 4 * 1000 * 4 + 4 * 4096
    assert found.transient_bytes == 4 * 512 * 4096 // 2
    assert found.total_bytes == found.transient_bytes + found.held_bytes + SPARE_BYTES


def test_a_compiled_model_counts_its_longest_gear(tmp_path: Path) -> None:
    """An .om holds no more than it was compiled for, whatever the model could."""
    model(tmp_path, "model.om", cache_dtype="fp16", gears=[(1, 1, 256), (1, 64, 256), (4, 1, 256)])
    found = needs("npu", tmp_path, slots=2, context_tokens=1024)
    assert found is not None
    assert found.arena_bytes == 2 * 256 * 2048 + 2 * 1000 * 4 + 64 * 2048
    assert found.transient_bytes == 2 * MIB


def test_fewer_slots_need_less(tmp_path: Path) -> None:
    """That is what a rung down is for."""
    model(tmp_path)
    sums = [needs("cpu", tmp_path, slots, 1024) for slots in (8, 4, 2)]
    totals = [found.total_bytes for found in sums if found is not None]
    assert totals == sorted(set(totals), reverse=True)


@pytest.mark.parametrize("content", [None, "{", '{"layers": 1}'])
def test_an_unreadable_model_has_no_sum(tmp_path: Path, content: str | None) -> None:
    """The worker says what is wrong with a folder; a sum is not invented."""
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    assert needs("cpu", tmp_path, 8, 0) is None


def test_a_load_that_does_not_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    """The refusal shows every term, what there is, and what to change."""
    admission = Admission(machine(tmp_path, available_mib=1000))
    load = Needs(100 * MIB, 300 * MIB, 200 * MIB)
    verdict = admission.ask("npu", load)
    assert not verdict.fits
    assert verdict.words == (
        "weights 300 + slots 200 + loading 100 + spare 512 = 1112 MiB, 1000 MiB are available; "
        "use fewer slots, a shorter context or a smaller model"
    )
    assert admission.ask("npu", Needs(0, 300 * MIB, 100 * MIB)).fits


def test_two_loads_at_once_do_not_share_the_same_memory(tmp_path: Path) -> None:
    """What is promised to a load under way is not there for another, until it has settled."""
    admission = Admission(machine(tmp_path, available_mib=1500))
    load = Needs(0, 600 * MIB, 0)
    assert admission.ask("npu", load).fits
    refused = admission.ask("cpu", load)
    assert not refused.fits
    assert "600 more are promised" in refused.words
    assert admission.ask("npu", load).fits
    admission.settle("npu")
    assert admission.ask("cpu", load).fits


def test_a_reservation_keeps_memory_for_the_engine_that_streams_wait_for(tmp_path: Path) -> None:
    """Whoever restarts meanwhile does not get it, also where it is not all there yet."""
    admission = Admission(machine(tmp_path, available_mib=1500))
    load = Needs(0, 600 * MIB, 0)
    admission.reserve("cpu", load)
    assert not admission.ask("npu", load).fits
    assert admission.ask("cpu", load).fits
    admission.settle("cpu")
    assert admission.ask("npu", load).fits


def test_the_devices_own_count_is_asked_too(tmp_path: Path) -> None:
    """The smaller of Linux's and the device's figure decides."""
    admission = Admission(machine(tmp_path, available_mib=4000))
    load = Needs(0, 600 * MIB, 0)
    assert not admission.ask("npu", load, device_free_bytes=1000 * MIB).fits
    assert admission.ask("npu", load, device_free_bytes=2000 * MIB).fits


def test_a_climb_counts_what_the_smaller_launch_gives_back(tmp_path: Path) -> None:
    """The present worker's memory is free for its successor."""
    admission = Admission(machine(tmp_path, available_mib=700))
    small, large = Needs(0, 300 * MIB, 100 * MIB), Needs(0, 300 * MIB, 200 * MIB)
    assert admission.room("npu", small, large)
    assert not admission.room("npu", small, Needs(0, 600 * MIB, 0))


def test_a_climb_is_not_tried_with_memory_promised_to_another_load(tmp_path: Path) -> None:
    """It would be refused, and would have cost a restart: what another load will take counts."""
    admission = Admission(machine(tmp_path, available_mib=1200))
    small, large = Needs(0, 300 * MIB, 100 * MIB), Needs(0, 300 * MIB, 200 * MIB)
    admission.reserve("cpu", Needs(0, 700 * MIB, 0))
    assert not admission.room("npu", small, large)
    assert not admission.fits("npu", large, 0)
    assert admission.fits("cpu", Needs(0, 600 * MIB, 0), 0)
    admission.settle("cpu")
    assert admission.room("npu", small, large)


def test_a_climb_asks_the_devices_own_count_too(tmp_path: Path) -> None:
    """What the device has free and what the smaller launch gives back must hold the larger one."""
    admission = Admission(machine(tmp_path, available_mib=4000))
    small, large = Needs(0, 300 * MIB, 100 * MIB), Needs(0, 300 * MIB, 200 * MIB)
    free = [600 * MIB]
    gate = Gate("npu", admission, lambda: free[0])
    assert not gate.room(small, large)
    free[0] = 620 * MIB
    assert gate.room(small, large)


@pytest.mark.parametrize(
    ("available_mib", "some", "full", "words"),
    [
        (1000, 0, 0, ""),
        (1000, 39, 9, ""),
        (200, 0, 0, "200 MiB of memory are left, less than 256"),
        (1000, 50, 12, "all tasks waited for memory 12 % of the last 10 s"),
        (1000, 50, 0, "tasks waited for memory 50 % of the last 10 s"),
    ],
)
def test_pressure_is_told_before_the_kernel_acts(
    tmp_path: Path, available_mib: int, some: float, full: float, words: str
) -> None:
    """Little memory left, or tasks that wait for it, is pressure; the words say which."""
    memory = machine(tmp_path, available_mib, some, full)
    assert pressed(memory, 256 * MIB, 40, 10) == words


def test_the_machines_figures_are_read(tmp_path: Path) -> None:
    """MemAvailable, MemTotal and the kernel's own kills, by their exact names."""
    memory = machine(tmp_path, 1000)
    assert memory.available_bytes() == 1000 * MIB
    assert memory.total_bytes() == 8192 * MIB
    assert memory.oom_kills() == 3


def test_a_limit_on_the_service_counts_as_the_machines_end(tmp_path: Path) -> None:
    """MemoryMax= of the unit, or of a group around it, is what there is; page cache can go."""
    machine(tmp_path, 4000)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("1:name=systemd:/x\n0::/system.slice/edged.service\n")
    own = tmp_path / "cgroup/system.slice/edged.service"
    own.mkdir(parents=True)
    memory = Memory(tmp_path, tmp_path / "cgroup")
    assert memory.available_bytes() == 4000 * MIB
    (own / "memory.max").write_text("max\n")
    (own / "memory.current").write_text(f"{500 * MIB}\n")
    assert memory.available_bytes() == 4000 * MIB
    (own / "memory.max").write_text(f"{2000 * MIB}\n")
    assert memory.available_bytes() == 1500 * MIB
    (own / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MIB}\n")
    assert memory.available_bytes() == 1600 * MIB
    (own.parent / "memory.max").write_text(f"{900 * MIB}\n")
    (own.parent / "memory.current").write_text(f"{600 * MIB}\n")
    assert memory.available_bytes() == 300 * MIB


def test_a_kernel_without_these_files_admits_and_is_never_pressed(tmp_path: Path) -> None:
    """What cannot be known stops nothing, and is said."""
    memory = Memory(tmp_path / "nothing", tmp_path / "nothing")
    assert pressed(memory, 256 * MIB, 40, 10) == ""
    verdict = Admission(memory).ask("cpu", Needs(0, 1 << 50, 0))
    assert verdict.fits
    assert "unknown" in verdict.words


def test_this_machine_can_be_read() -> None:
    """On Linux MemAvailable is a real figure."""
    available, total = Memory().available_bytes(), Memory().total_bytes()
    assert available is not None
    assert total is not None
    assert 0 < available <= total
    assert (Memory().resident_bytes(os.getpid()) or 0) > MIB
    assert Memory().resident_bytes(0) is None
