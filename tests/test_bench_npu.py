"""The NPU path's bench, on a tiny model: every figure is there, and the exact ones are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny import Tiny

BENCH = Path(__file__).parent.parent / "tools" / "bench_npu.py"
FIGURES = {
    *("loop_ratio_1", "loop_ratio_4", "loop_ratio_8", "batch_gain_8", "prefix_ttft_ratio"),
    *("host_ms_per_step_1", "host_ms_per_step_8", "arena_alloc_ratio"),
    *("load_s", "first_inference_s", "ready_s"),
}


def test_the_bench_measures_what_it_promises(tmp_path: Path) -> None:
    """All figures in the RESULT line; no allocation per request; the board model is followed."""
    source = Tiny(context=1024, seed=5).write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, str(BENCH), "--quick", "--model", str(source)]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    kind, _, text = done.stdout.splitlines()[-1].partition(" ")
    assert kind == "RESULT"
    found = json.loads(text)
    assert all(found[name] > 0 for name in FIGURES)
    assert found["device_allocations_per_request"] == 0
    assert found["device_model_error_percent"] < 5
