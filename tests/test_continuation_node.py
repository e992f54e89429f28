"""A node whose fallback is a smaller model with another tokenizer, as real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import openai
import pytest
from daemon import daemon
from tiny import Tiny

pytestmark = pytest.mark.model


def test_a_small_model_with_another_tokenizer_goes_on_by_text(tmp_path: Path) -> None:
    """The NPU's worker dies in mid-stream: the CPU's own model writes the rest, within its own
    context, and the reply names both and says that it is approximate."""
    small = Tiny(context=256)
    path = tmp_path / "small.gguf"
    small.write_gguf(path)
    sets = ("engines.chain=['npu','cpu']", "npu.twin=310b4", "npu.context_gears=[512]")
    with (
        daemon(*sets, "npu.dtype=fp32", f"cpu.model={path}") as node,
        openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0) as api,
    ):
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s:
            if {e["state"] for e in node.get("/edged/v1/status")["engines"]} == {"ready"}:
                break
            time.sleep(0.2)
        npu = next(w for w in node.workers() if "npu" in w.cmdline())
        stream = api.completions.create(
            model="", prompt="Once", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(iter(stream))]
        npu.send_signal(signal.SIGKILL)
        chunks += list(stream)
        extra = chunks[-1].model_extra or {}
        first, second = extra["edged"]["engines"]

    assert [first["name"], second["name"]] == ["npu", "cpu"]
    assert first["model"] != second["model"]
    assert (first["approximate"], second["approximate"]) == (False, True)
    assert first["to_token"] == second["from_token"] > 0
    assert second["to_token"] == 60
    assert chunks[-1].choices[0].finish_reason == "length"
