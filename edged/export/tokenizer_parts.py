"""What both readers of a tokenizer hand over, and what they do alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from edged.text.vocabulary import looks_control


@dataclass(frozen=True)
class Parts:
    """A tokenizer and its special ids. merges: "left right", most frequent first."""

    tokenizer: Tokenizer
    merges: Sequence[str]
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None
    add_bos: bool
    chat_template: str | None


def mark_controls(tokenizer: Tokenizer) -> None:
    """Make control tokens of those that look like one but are not marked so."""
    tokenizer.add_special_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            for token in tokenizer.get_added_tokens_decoder().values()
            if not token.special and looks_control(token.content)
        ]
    )
