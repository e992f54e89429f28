"""The exported demo model: llama.cpp's own tokens, bounded memory, close quantised twins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reference import Driver, LlamaCpp, chat_prompts, demo_f32_gguf, demo_gguf, exported

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
SAID = 32
EMBEDDING_BYTES = 49_152 * 576 * 4


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaCpp]:
    yield LlamaCpp(demo_f32_gguf(), context=256, threads=1)


@pytest.fixture(scope="module")
def prompts(llama: LlamaCpp) -> list[list[int]]:
    return [llama.tokenize(text, False, True) for text in chat_prompts()]


@pytest.fixture(scope="module")
def theirs(llama: LlamaCpp, prompts: list[list[int]]) -> list[list[int]]:
    return [llama.generate(prompt, SAID) for prompt in prompts]


@pytest.mark.parametrize(("target", "count"), [("cpu", 12), ("onnx", 3)])
def test_greedy_tokens_are_llama_cpps(
    target: str, count: int, prompts: list[list[int]], theirs: list[list[int]]
) -> None:
    """Chat prompts x 32 tokens, the same float32 weights, token for token."""
    driver = Driver(exported("fp32", target), context=128, threads=1)
    said = [driver.generate(prompt, SAID) for prompt in prompts[:count]]
    assert said == theirs[:count]
    assert len(said) == count


@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_quantised_weights_follow_the_float_ones(
    dtype: str, prompts: list[list[int]], theirs: list[list[int]]
) -> None:
    """Fed llama.cpp's float32 answers, a quantised graph prefers the same next token almost
    always, and its probabilities stay near (mean divergence below 0.02 nat)."""
    exact, blocks = (Driver(exported(name), context=128, threads=1) for name in ("fp32", dtype))
    agreed, divergences = [], []
    for prompt, answer in zip(prompts[2:6], theirs[2:6], strict=True):
        for driver in (exact, blocks):
            driver.reset()
        for ids in (prompt, *([token] for token in answer[:16])):
            p, q = (_log_softmax(driver.feed(ids)) for driver in (exact, blocks))
            agreed.append(p.argmax() == q.argmax())
            divergences.append(float((np.exp(p) * (p - q)).sum()))
    assert np.mean(agreed) > 0.9
    assert np.mean(divergences) < 0.02


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp32", "fp16"])
def test_an_export_needs_little_memory(dtype: str, tmp_path: Path) -> None:
    """Peak memory above what the imports take is below 2.5 times the embedding, all but the
    golden prompt, which has the whole graph in memory."""
    imports = _peak_bytes("import edged.export.run, gguf, onnx, tokenizers")
    code = "import sys; from edged.export.run import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--model", str(demo_gguf()), "--out", str(tmp_path / "out"), "--dtype", dtype]
    arguments += ["--no-golden", "--target", "onnx" if dtype == "fp16" else "cpu"]
    assert _peak_bytes(code, *arguments) - imports < 2.5 * EMBEDDING_BYTES


def _peak_bytes(code: str, *arguments: str) -> int:
    """Largest resident size of a Python process."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_maxrss * 1024


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
