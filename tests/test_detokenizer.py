"""The detokeniser gives whole characters at once, loses nothing and never raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from fakes_text import crossing_tokenizer, nasty_strings
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from edged.text.detokenizer import Detokenizer
from edged.text.tokens import Tokens

# Pieces as tokens hold them: whole characters, halves of them, and bytes no text has.
_PIECES = st.one_of(
    st.text(max_size=3).map(str.encode),
    st.sampled_from([bytes([byte]) for byte in "漢🤖é".encode()]),
    st.binary(max_size=3),
)


def table(pieces: Sequence[bytes]) -> Callable[[int], bytes]:
    return lambda token_id: pieces[token_id]


@given(st.lists(_PIECES, max_size=40), st.lists(st.integers(1, 4), max_size=40))
@settings(deadline=None, max_examples=400)
def test_pushes_and_flush_equal_decoding_at_once(pieces: list[bytes], sizes: list[int]) -> None:
    """However the ids are grouped, the text is that of all bytes together."""
    ids = list(range(len(pieces)))
    stream = Detokenizer(table(pieces))
    text = ""
    for size in [*sizes, len(ids)]:
        text += stream.push(ids[:size])
        ids = ids[size:]
    assert text + stream.flush() == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(min_size=1, max_size=30))
@settings(deadline=None, max_examples=200)
def test_never_half_a_character(text: str) -> None:
    """One byte per token: each character comes out whole with its last byte, none before."""
    stream = Detokenizer(lambda byte: bytes([byte]))
    for char in text:
        *early, last = char.encode()
        assert [stream.push([byte]) for byte in early] == [""] * len(early)
        assert stream.push([last]) == char
    assert stream.flush() == ""


@given(st.lists(_PIECES, max_size=30), st.integers(0, 30))
@settings(deadline=None, max_examples=400)
def test_a_stream_continues_inside_a_character(pieces: list[bytes], place: int) -> None:
    """Seeded with the ids so far, the rest gives exactly the rest of the text."""
    ids = list(range(len(pieces)))
    whole = Detokenizer(table(pieces))
    before = whole.push(ids[:place])
    after = whole.push(ids[place:]) + whole.flush()
    seeded = Detokenizer(table(pieces), ids[:place])
    assert seeded.push(ids[place:]) + seeded.flush() == after
    assert before + after == b"".join(pieces).decode("utf-8", "replace")


def test_a_broken_character_becomes_a_mark_as_soon_as_it_is_certain() -> None:
    """Three bytes of an emoji followed by a letter: one U+FFFD, then the letter, at once."""
    stream = Detokenizer(lambda byte: bytes([byte]))
    assert stream.push([0xF0, 0x9F, 0xA4]) == ""
    assert stream.push([ord("a")]) == "\ufffda"
    stream.push([0xE6, 0xBC])
    assert stream.flush() == "\ufffd"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    tokenizer = crossing_tokenizer(nasty_strings())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_random_ids_decode_as_the_tokenizer_library_does(
    trained: Tokenizer, data: st.DataObject
) -> None:
    """Any ids, control tokens and unknown ones among them: the library's text, no control text."""
    ids = data.draw(st.lists(st.integers(0, trained.get_vocab_size() - 1), max_size=60))
    stream = Detokenizer(Tokens(trained, 100).text_bytes)
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
    assert text == trained.decode(ids, skip_special_tokens=True)


def test_unknown_ids_are_empty_text(trained: Tokenizer) -> None:
    """Ids above the tokenizer (padding rows of a graph) and below zero write nothing."""
    stream = Detokenizer(Tokens(trained, 100).text_bytes)
    assert stream.push([trained.get_vocab_size() + 5, 10**9, -1]) == ""
    assert stream.flush() == ""


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 family", "漢字🤖", "e\u0301\u0308", "🇩🇪🇫🇷"])
def test_text_of_many_byte_tokens_comes_back(trained: Tokenizer, text: str) -> None:
    """Characters spread over several tokens are put together again."""
    tokens = Tokens(trained, 100)
    ids = tokens.encode(text)
    stream = Detokenizer(tokens.text_bytes)
    assert "".join(stream.push([token_id]) for token_id in ids) == text
