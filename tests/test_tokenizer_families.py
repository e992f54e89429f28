"""Each tokenizer family edged knows gives the ids of llama.cpp's own tokenizer.

The small vocabularies here merge across every boundary, so a text cut in another place shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from unicodedata import normalize

import pytest
from fakes_text import crossing_tokenizer, llama_cpp, nasty_strings, write_gguf
from tokenizers import Tokenizer

from edged.export.pretokenizers import FAMILIES
from edged.export.tokenizer_gguf import read_gguf
from edged.text.tokens import Tokens

STRINGS = nasty_strings()


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return crossing_tokenizer(STRINGS)


def as_seen(pre: str, text: str) -> str:
    """The text both sides are given: Qwen composes characters, llama.cpp does not."""
    return normalize("NFC", text) if FAMILIES[pre].normalizer else text


@pytest.mark.parametrize("pre", FAMILIES)
def test_ids_equal_llama_cpps(tmp_path: Path, vocabulary: Tokenizer, pre: str) -> None:
    """More than 400 nasty strings, control literals as text: the same ids."""
    path = write_gguf(tmp_path / "tiny.gguf", vocabulary, pre)
    tokens = Tokens(read_gguf(path).tokenizer, 10**6)
    assert len(set(STRINGS)) > 200
    with llama_cpp(path) as reference:
        for text in (as_seen(pre, text) for text in STRINGS):
            assert tokens.encode(text) == reference.ids(text), ascii(text)


def test_trusted_text_is_parsed_as_llama_cpp_parses_it(
    tmp_path: Path, vocabulary: Tokenizer
) -> None:
    """With control literals parsed, too, the ids are the same."""
    path = write_gguf(tmp_path / "tiny.gguf", vocabulary, "smollm")
    tokens = Tokens(read_gguf(path).tokenizer, 10**6)
    with llama_cpp(path) as reference:
        for text in STRINGS:
            assert tokens.parse_literals(text) == reference.ids(text, parse_special=True)


def test_the_families_really_differ(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """Every two kinds disagree on many of the strings, so the comparison above can fail."""
    kinds = ("gpt-2", "smollm", "llama-bpe", "qwen2")
    found = {}
    for pre in kinds:
        path = write_gguf(tmp_path / f"{pre}.gguf", vocabulary, pre)
        tokens = Tokens(read_gguf(path).tokenizer, 10**6)
        found[pre] = [tokens.encode(text) for text in STRINGS]
    for one in kinds:
        for other in kinds:
            differing = sum(a != b for a, b in zip(found[one], found[other], strict=True))
            assert one == other or differing > 20, (one, other)


def test_whole_words_are_taken_before_merges_in_llama_3(tmp_path: Path) -> None:
    """ignore_merges: a word that is a token is one id although no merges lead to it."""
    vocabulary = _with_word(crossing_tokenizer(STRINGS, 400), "zqxj")
    path = write_gguf(tmp_path / "tiny.gguf", vocabulary, "llama-bpe")
    tokens = Tokens(read_gguf(path).tokenizer, 10**6)
    with llama_cpp(path) as reference:
        assert tokens.encode("zqxj") == reference.ids("zqxj")
    assert len(tokens.encode("zqxj")) == 1


def _with_word(tokenizer: Tokenizer, word: str) -> Tokenizer:
    """The same tokenizer with one more entry in its vocabulary, reached by no merge."""
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    vocab[word] = max(vocab.values()) + 1
    return Tokenizer.from_str(json.dumps(described))
