"""What the daemon checks of the models of its chain before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edged.errors import ConfigError
from edged.manifest import foreign, shared_context_tokens


def model(folder: Path, **fields: object) -> Path:
    folder.mkdir()
    about = {"name": folder.name, "context_tokens": 8192, "tokenizer_hash": "t", **fields}
    (folder / "model.json").write_text(json.dumps(about))
    return folder


def test_a_stream_must_fit_every_engine_of_the_chain(tmp_path: Path) -> None:
    """The context offered is the shortest of: each model's own, its longest gear, the cap."""
    npu = model(tmp_path / "npu", gears=[(1, 1, 512), (1, 1, 2048)])
    cpu = model(tmp_path / "cpu")

    assert shared_context_tokens({"cpu": cpu}, 0) == 8192
    assert shared_context_tokens({"npu": npu, "cpu": cpu}, 0) == 2048
    assert shared_context_tokens({"npu": npu, "cpu": cpu}, 1000) == 1000
    assert shared_context_tokens({"cpu": cpu}, 100_000) == 8192


def test_a_model_with_another_tokenizer_neither_shares_ids_nor_shortens_the_context(
    tmp_path: Path,
) -> None:
    """It goes on by text, so it counts among the foreign ones and sets no bound."""
    dirs = {
        "npu": model(tmp_path / "npu"),
        "cpu": model(tmp_path / "cpu", tokenizer_hash="u", context_tokens=512),
    }
    assert list(foreign(dirs)) == ["cpu"]
    assert foreign({"npu": dirs["npu"]}) == {}
    assert shared_context_tokens(dirs, 0) == 8192


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    """The message names the file and the next step."""
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json.*export the model again"):
        shared_context_tokens({"cpu": tmp_path}, 0)
