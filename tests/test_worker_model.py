"""The step loop on the real fp32 demo model: the same greedy tokens however it is batched.

The reference drives the same graph alone, in one piece, without any of the worker's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes_worker import Rig, ask

from edged import wire
from edged.core import Limits
from edged.worker.contract import ContractError, check_graph, read_spec
from edged.worker.ort import OrtExecutor

pytestmark = pytest.mark.model
SAID = 24
LENGTHS = (3, 9, 17, 30, 34, 48, 49, 66)


@pytest.fixture(scope="module", params=["onnx", "cpu"])
def folder(request: pytest.FixtureRequest) -> Path:
    """The plain graph, whose new rows are copied, and the one that appends in place."""
    from reference import exported

    return exported("fp32", request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(20, 40_000, size=n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[list[int]]:
    """What the plain driver says to each prompt."""
    from reference import Driver, exported

    driver = Driver(exported("fp32", "onnx"), context=128)
    return [driver.generate(prompt, SAID) for prompt in prompts]


@pytest.fixture(scope="module")
def executor(folder: Path) -> OrtExecutor:
    return OrtExecutor(read_spec(folder, 2048), 8, 2)


@pytest.fixture
def rig(executor: OrtExecutor, folder: Path) -> Iterator[Rig]:
    executor.repack(executor.gears.context[0], [0] * 8)
    limits = Limits(8, prefill_chunk=64)
    with closing(Rig(executor, read_spec(folder, 2048), limits)) as made:  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_batch_of_mixed_lengths_says_what_each_says_alone(
    rig: Rig, prompts: list[list[int]], alone: list[list[int]], chunk: int
) -> None:
    """Eight streams at once, prefilled in chunks between the others' decode steps."""
    rig.say(wire.SetLimits(8, 1.0, chunk, True))
    for i, prompt in enumerate(prompts):
        rig.say(ask(i, prompt, SAID))
    rig.drain()
    assert [rig.ids[i] for i in range(8)] == alone
    assert max(report.batch for report in rig.reports) >= 7


def test_one_stream_says_it_too(rig: Rig, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Alone in the worker, in large chunks; then again from its cached rows."""
    rig.say(ask(1, prompts[6], SAID))
    rig.drain()
    rig.say(ask(2, prompts[6], SAID))
    rig.drain()
    assert rig.ids[1] == rig.ids[2] == alone[6]
    assert next(row for row in rig.rows if row.stream == 2).cached_tokens == LENGTHS[6] - 1


def test_a_re_pack_changes_nothing(
    rig: Rig, prompts: list[list[int]], alone: list[list[int]], executor: OrtExecutor
) -> None:
    """A neighbour with a long prompt makes the context grow under running streams."""
    for i in (0, 1, 5):
        rig.say(ask(i, prompts[i], SAID))
    rig.turn(8)
    assert executor.context == 256
    rig.say(ask(9, (prompts[7] * 10)[:600], 2))
    rig.drain()
    assert executor.context == 1024
    assert [rig.ids[i] for i in (0, 1, 5)] == [alone[i] for i in (0, 1, 5)]


def test_a_prefix_copied_from_a_busy_slot_changes_nothing(
    rig: Rig, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Two streams share a long prompt while the first is still speaking."""
    rig.say(ask(1, prompts[7], SAID))
    rig.turn(3)
    rig.say(ask(2, prompts[7], SAID))
    rig.drain()
    assert rig.ids[1] == rig.ids[2] == alone[7]
    assert next(row for row in rig.rows if row.stream == 2).cached_tokens == LENGTHS[7] - 1


def test_a_hole_in_the_window_keeps_its_rows(
    rig: Rig, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """A free slot between two running streams still holds its conversation afterwards."""
    for stream, count in ((0, 12), (1, 2), (2, 12)):  # too soon for a compaction
        rig.say(ask(stream, prompts[stream + 3], count))
    rig.drain()
    rig.say(ask(3, prompts[4], SAID))
    rig.drain()
    assert rig.ids[0] == alone[3][:12]
    assert rig.ids[2] == alone[5][:12]
    assert rig.ids[3] == alone[4]
    assert next(row for row in rig.rows if row.stream == 3).cached_tokens == LENGTHS[4] - 1


def test_a_continuation_goes_on_with_the_same_tokens(
    rig: Rig, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Ids generated elsewhere are prefilled and the rest follows, seeded draws included."""
    half = SAID // 2
    prompt = prompts[2]
    rig.say(ask(1, [*prompt, *alone[2][:half]], SAID, prompt_tokens=len(prompt)))
    seeded = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "ignore_eos": True}
    rig.say(ask(2, prompt, SAID, **seeded))
    rig.drain()
    said = rig.ids[2]
    rig.say(ask(3, [*prompt, *said[:half]], SAID, prompt_tokens=len(prompt), **seeded))
    rig.drain()
    assert rig.ids[1] == alone[2][half:]
    assert rig.ids[3] == said[half:]


def test_a_graph_that_is_not_the_described_one_is_refused(folder: Path) -> None:
    """Missing, mistyped, misshapen and unknown tensors are named."""
    import onnx

    spec = read_spec(folder)
    graph = onnx.load(str(spec.graph_path), load_external_data=False).graph
    inputs, outputs = _declared(graph.input), _declared(graph.output)
    check_graph(spec, inputs, outputs)
    for spoiled, name in (
        ({k: v for k, v in inputs.items() if k != "kv_pos"}, "kv_pos"),
        (inputs | {"past_k.3": ("fp16", inputs["past_k.3"][1])}, "past_k.3"),
        (inputs | {"past_len": ("int32", ("B", 2))}, "past_len"),
        (inputs | {"attention_mask": ("int32", ("B",))}, "attention_mask"),
    ):
        with pytest.raises(ContractError, match=name):
            check_graph(spec, spoiled, outputs)


def _declared(values: Any) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Tensors as onnxruntime would name them."""
    kinds = {1: "fp32", 6: "int32"}
    return {
        value.name: (
            kinds[value.type.tensor_type.elem_type],
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
        )
        for value in values
    }
