"""Exporting a tokenizer: the same one from both kinds of source, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes_text import CONTROLS, USER_DEFINED, crossing_tokenizer, nasty_strings, write_gguf
from tokenizers import Tokenizer, decoders, processors

from edged.export import ExportError
from edged.export.gguf_metadata import read_metadata
from edged.export.pretokenizers import FAMILIES
from edged.export.tokenizer import TOKENIZER_FILE, TokenizerInfo, export_tokenizer

STRINGS = nasty_strings()


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return crossing_tokenizer(STRINGS, 800)


def write_hf(folder: Path, vocabulary: Tokenizer, **config: Any) -> Path:
    """A Hugging Face folder's text files around a vocabulary, cut as SmolLM cuts."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_str(vocabulary.to_str())
    tokenizer.pre_tokenizer = FAMILIES["smollm"].pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] not in USER_DEFINED  # a trainer marks them all
    (folder / "tokenizer.json").write_text(json.dumps(described))
    defaults = {"bos_token": CONTROLS[1], "eos_token": {"content": CONTROLS[2], "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder


def test_both_sources_give_the_same_tokenizer(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """GGUF and Hugging Face folder of one model: same ids, same facts, same identity."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    gguf = write_gguf(tmp_path / "m.gguf", vocabulary, "smollm", add_bos_token=False)
    from_gguf = export_tokenizer(gguf, one)
    from_hf = export_tokenizer(write_hf(tmp_path / "hf", vocabulary), two)
    assert from_gguf == from_hf
    assert from_hf.vocab_size == vocabulary.get_vocab_size()
    assert (from_hf.bos_id, from_hf.bos_token, from_hf.add_bos) == (1, CONTROLS[1], False)
    assert from_hf.eos_token == CONTROLS[2]
    left, right = (Tokenizer.from_file(str(folder / TOKENIZER_FILE)) for folder in (one, two))
    for text in STRINGS:
        assert left.encode(text).ids == right.encode(text).ids


def test_the_identity_tells_vocabularies_apart(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """Same file, same hash; another merge order, type or entry, another hash."""

    def identity(source: Path) -> str:
        return export_tokenizer(source, tmp_path).tokenizer_hash

    first = identity(write_gguf(tmp_path / "a.gguf", vocabulary, "smollm"))
    assert identity(write_gguf(tmp_path / "b.gguf", vocabulary, "smollm")) == first
    other = crossing_tokenizer(STRINGS, 801)
    assert identity(write_gguf(tmp_path / "c.gguf", other, "smollm")) != first


def test_every_end_of_turn_token_ends_an_answer(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """eos_ids holds the file's own and the well-known control tokens."""
    info = export_tokenizer(write_gguf(tmp_path / "m.gguf", vocabulary, "smollm"), tmp_path)
    literals = {CONTROLS[i] for i in info.eos_ids}
    assert literals == {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>"}
    folder = write_hf(tmp_path / "hf", vocabulary)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert 7 in export_tokenizer(folder, tmp_path).eos_ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)],
)
def test_llama_3_begins_with_bos_unless_the_file_says_no(
    tmp_path: Path, vocabulary: Tokenizer, changes: dict[str, object], expected: bool
) -> None:
    """The family's default holds only where the file is silent."""
    source = write_gguf(tmp_path / "m.gguf", vocabulary, "llama-bpe", **changes)
    assert export_tokenizer(source, tmp_path).add_bos is expected


def test_a_folder_adds_bos_if_its_post_processor_does(
    tmp_path: Path, vocabulary: Tokenizer
) -> None:
    """Llama 3 folders say so only in tokenizer.json."""
    folder = write_hf(tmp_path / "hf", vocabulary)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    bos = CONTROLS[1]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, 1)])
    tokenizer.save(str(path))
    assert export_tokenizer(folder, tmp_path).add_bos


def test_chat_templates_are_found_in_all_their_places(
    tmp_path: Path, vocabulary: Tokenizer
) -> None:
    """GGUF key, configuration entry, list of named ones, file of its own."""

    def template(source: Path) -> str | None:
        return export_tokenizer(source, tmp_path).chat_template

    plain = write_gguf(tmp_path / "a.gguf", vocabulary, "smollm")
    assert template(plain) is None
    named = write_gguf(tmp_path / "b.gguf", vocabulary, "smollm", chat_template="in gguf")
    assert template(named) == "in gguf"
    assert template(write_hf(tmp_path / "hf", vocabulary, chat_template="in config")) == "in config"
    entries = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]
    folder = write_hf(tmp_path / "hf", vocabulary, chat_template=entries)
    assert template(folder) == "listed"
    (folder / "chat_template.jinja").write_text("own file")
    assert template(folder) == "own file"


def test_control_looking_tokens_become_control_tokens(
    tmp_path: Path, vocabulary: Tokenizer
) -> None:
    """A folder that forgets to mark <|user|> as special does not open a hole."""
    folder = write_hf(tmp_path / "hf", vocabulary)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    for token in described["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(described))
    export_tokenizer(folder, tmp_path)
    added = json.loads((tmp_path / TOKENIZER_FILE).read_text())["added_tokens"]
    marked = {token["content"] for token in added if token["special"]}
    assert marked == {text for text in CONTROLS if text.startswith("<|")}


def test_padding_at_the_end_of_a_vocabulary_is_left_out(tmp_path: Path) -> None:
    """Unused rows are no tokens: vocab_size is what may be drawn."""
    import gguf

    vocabulary = crossing_tokenizer(STRINGS, 500)
    source = write_gguf(tmp_path / "m.gguf", vocabulary, "smollm")
    values = read_metadata(source)
    writer = gguf.GGUFWriter(tmp_path / "padded.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*values["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"])
    writer.add_token_types([*values["tokenizer.ggml.token_type"], 5, 5])
    writer.add_token_merges(values["tokenizer.ggml.merges"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    info: TokenizerInfo = export_tokenizer(tmp_path / "padded.gguf", tmp_path)
    assert info.vocab_size == vocabulary.get_vocab_size()
    assert info.bos_id is None


@pytest.mark.parametrize(
    ("pre", "changes", "message"),
    [
        ("smollm", {"model": "llama"}, "SentencePiece .*take a model of the Llama 3, Qwen2"),
        ("smollm", {"model": "bert"}, "WordPiece"),
        ("smollm", {"model": "new"}, "new"),
        ("martian", {}, "unknown tokenizer family .*'martian'; edged knows .*smollm"),
        ("default", {}, "does not say how its tokenizer cuts text"),
        (None, {}, "does not say how its tokenizer cuts text"),
    ],
)
def test_other_tokenizers_are_refused_by_name(
    tmp_path: Path, vocabulary: Tokenizer, pre: str | None, changes: dict[str, object], message: str
) -> None:
    """No guessing: the person learns what the model has and what edged speaks."""
    source = write_gguf(tmp_path / "m.gguf", vocabulary, pre, **changes)
    with pytest.raises(ExportError, match=message):
        export_tokenizer(source, tmp_path)
    assert not (tmp_path / TOKENIZER_FILE).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "Unigram"),
        ({"decoder": None}, "SentencePiece style"),
        ({"pre_tokenizer": {"type": "Martian"}}, "cannot use"),
    ],
)
def test_other_folders_are_refused_by_name(
    tmp_path: Path, vocabulary: Tokenizer, change: dict[str, Any], message: str
) -> None:
    """The same for tokenizer.json."""
    folder = write_hf(tmp_path / "hf", vocabulary)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ExportError, match=message):
        export_tokenizer(folder, tmp_path)


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    """A folder with only tokenizer.model is recognised as what it is."""
    with pytest.raises(ExportError, match=r"tokenizer\.json is missing"):
        export_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 30, 5000])
def test_a_file_cut_short_is_refused(tmp_path: Path, vocabulary: Tokenizer, keep: int) -> None:
    """Wherever a download stopped inside the metadata, the message says so."""
    source = write_gguf(tmp_path / "m.gguf", vocabulary, "smollm")
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ExportError, match=r"cannot read .* as GGUF: .*; fetch it again"):
        export_tokenizer(source, tmp_path)


def test_metadata_reads_as_the_gguf_package_reads_it(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """Every key and value of a file, compared with the reference reader."""
    import gguf

    source = write_gguf(tmp_path / "m.gguf", vocabulary, "smollm", add_bos_token=True)
    reference = gguf.GGUFReader(source).fields
    found = read_metadata(source)
    assert {f"GGUF.{k}" for k in ("version", "tensor_count", "kv_count")} | set(found) == set(
        reference
    )
    for key, value in found.items():
        assert value == reference[key].contents(), key
