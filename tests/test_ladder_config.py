"""From configuration to rungs and fallback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_memory import MIB, machine, model

from edged import config
from edged.engine.factory import make_engines
from edged.engine.rungs import make_rungs
from edged.engine.worker_engine import WorkerEngine
from edged.errors import ConfigError
from edged.manifest import check_small_model
from edged.memory import needs

NPU = ("engines.chain=['npu','cpu']", "npu.model=/nowhere")


def rungs(tmp_path: Path, name: str, *sets: str) -> list[tuple[str, int, int]]:
    folder = model(tmp_path / "m", "model.om" if name == "npu" else "model.onnx")
    made = make_rungs(name, config.load(None, (*NPU, *sets)), folder, 1024)
    return [(rung.words, rung.launch.slots, rung.launch.context_tokens) for rung in made]


def test_rungs_halve_the_slots(tmp_path: Path) -> None:
    """Full, half, a quarter; few slots make few rungs, and there is always one."""
    assert [slots for _, slots, _ in rungs(tmp_path, "npu")] == [8, 4, 2]
    assert [slots for _, slots, _ in rungs(tmp_path, "npu", "npu.slots=3")] == [3, 1]
    assert rungs(tmp_path, "cpu", "cpu.slots=1") == [("1 slot", 1, 1024)]


def test_the_small_model_is_the_last_rung(tmp_path: Path) -> None:
    """It holds what it was compiled for, and no more."""
    small = model(tmp_path / "small", "model.om", gears=[(1, 1, 256), (4, 1, 256)])
    made = rungs(tmp_path, "npu", f"npu.small_model={small}")
    assert made[-1] == ("4 slots of the small model", 4, 256)
    assert [words for words, _, _ in made[:-1]] == ["8 slots", "4 slots", "2 slots"]


def test_a_small_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its ids would be other words; the message names the key."""
    dirs = []
    for name, tokenizer in (("a", "t"), ("b", "u")):
        folder = tmp_path / name
        folder.mkdir()
        about = {"name": name, "context_tokens": 64, "tokenizer_hash": tokenizer}
        (folder / "model.json").write_text(json.dumps(about))
        dirs.append(folder)
    check_small_model(dirs[0], dirs[0])
    with pytest.raises(ConfigError, match=r"npu\.small_model: .* another tokenizer"):
        check_small_model(dirs[0], dirs[1])


def test_a_card_with_its_own_memory_is_not_measured_by_the_hosts(tmp_path: Path) -> None:
    """npu.memory = own: the worker asks the card."""
    folder = model(tmp_path / "m", "model.om")
    own = config.load(None, (*NPU, "npu.memory=own"))
    assert [rung.needs for rung in make_rungs("npu", own, folder, 1024)] == [None] * 3


def chain(tmp_path: Path, available_mib: int, *sets: str) -> dict[str, WorkerEngine]:
    """The engines of a board with that much memory."""
    machine(tmp_path / "proc", available_mib)
    dirs = {
        "npu": model(tmp_path / "npu", "model.om", weights=500 * MIB),
        "cpu": model(tmp_path / "cpu", weights=500 * MIB),
    }
    loaded = config.load(
        None, (*NPU, f"state_dir={tmp_path}", f"recover.proc={tmp_path / 'proc'}", *sets)
    )
    engines = make_engines(loaded, "m", dirs, 1024, tmp_path / "twin")
    return {engine.name: engine for engine in engines}


def test_auto_is_warm_where_both_models_fit_with_a_gibibyte_to_spare(tmp_path: Path) -> None:
    """The decision is a sum, and status shows it."""
    model(tmp_path / "npu", "model.om", weights=500 * MIB)
    model(tmp_path / "cpu", weights=500 * MIB)
    sums = [needs(name, tmp_path / name, 8, 1024) for name in ("npu", "cpu")]
    both = sum(s.transient_bytes + s.held_bytes for s in sums if s is not None) // MIB + 1024
    assert not chain(tmp_path, both + 1)["cpu"].health().standby
    tight = chain(tmp_path, both - 1)["cpu"].health()
    assert (tight.state, tight.standby) == ("off", True)
    assert f"{both - 1} MiB are available" in tight.detail


@pytest.mark.parametrize(("fallback", "standby"), [("warm", False), ("lazy", True)])
def test_fallback_can_be_chosen(tmp_path: Path, fallback: str, standby: bool) -> None:
    """warm and lazy hold whatever the memory."""
    for available_mib in (100, 100_000):
        engines = chain(tmp_path, available_mib, f"engines.fallback={fallback}")
        assert engines["cpu"].health().standby == standby
        assert not engines["npu"].health().standby


def test_a_fallback_that_is_off_is_not_in_the_chain(tmp_path: Path) -> None:
    """`off` takes the CPU engine out; a CPU engine that is no fallback stays."""
    assert list(chain(tmp_path, 9000, "engines.fallback=off")) == ["npu"]
    first = ("engines.chain=['cpu','npu']", "engines.fallback=off")
    assert list(chain(tmp_path, 9000, *first)) == ["cpu", "npu"]


def test_the_cpu_engine_leaves_a_core_to_the_npus_host_side(tmp_path: Path) -> None:
    """cores - 1 beside an NPU that runs or is about to; all of them alone; a set number holds."""
    cores = len(os.sched_getaffinity(0))
    engines = chain(tmp_path, 9000)
    means = engines["cpu"].keeper.means
    engines["npu"].keeper.state = "ready"
    assert means.threads() == max(1, cores - 1)
    engines["npu"].keeper.state = "off"
    assert means.threads() == 0
    engines = chain(tmp_path, 9000, "cpu.threads=3")
    engines["npu"].keeper.state = "ready"
    assert engines["cpu"].keeper.means.threads() == 0
    assert engines["cpu"].keeper.rung.launch.threads == 3


def test_the_last_engine_of_the_chain_is_never_off_for_long(tmp_path: Path) -> None:
    """The NPU may rest for hours behind a CPU engine that serves; nobody serves for the last."""
    engines = chain(tmp_path, 9000)
    assert engines["npu"].keeper.rules.off_max_s == 14_400
    assert engines["cpu"].keeper.rules.off_max_s == 300
    assert chain(tmp_path, 9000, "engines.fallback=off")["npu"].keeper.rules.off_max_s == 300
