"""Tokens: one tokenizer in plain mode, where only marks become control tokens.

Encoding text never yields a control token; that is checked on the way out, not only trusted.
The mode is set once, so encoding is safe from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from edged.errors import RequestError
from edged.text.vocabulary import looks_control, piece_bytes


class Tokens:
    """control: literal -> id of the control tokens. start_ids: (bos,) where the model wants it."""

    def __init__(self, tokenizer: Tokenizer, start_ids: tuple[int, ...] = ()) -> None:
        added = tokenizer.get_added_tokens_decoder()
        unmarked = [t for t in added.values() if not t.special and looks_control(t.content)]
        if unmarked:
            tokenizer.add_special_tokens([_as_control(token) for token in unmarked])
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.start_ids = start_ids
        self._literal_bytes = {i: token.content.encode() for i, token in added.items()}
        special = {
            i: token for i, token in added.items() if token.special or looks_control(token.content)
        }
        self.control = {token.content: i for i, token in special.items()}
        self._control_ids = frozenset(special)
        self._eats_left = frozenset(token.content for token in special.values() if token.lstrip)
        self._eats_right = frozenset(token.content for token in special.values() if token.rstrip)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; literals of control tokens are text too."""
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise RequestError(
                "invalid_request", "the text spells a control token this model cannot keep apart"
            )
        return ids

    def encode_marked(self, parts: Sequence[str]) -> list[int]:
        """Ids of text, control literal, text, control literal, ..., text.

        Some models' control tokens swallow the blanks beside them, as in training.
        """
        texts, literals = list(parts[::2]), parts[1::2]
        for index, literal in enumerate(literals):
            if literal in self._eats_left:
                texts[index] = texts[index].rstrip()
            if literal in self._eats_right:
                texts[index + 1] = texts[index + 1].lstrip()
        ids = self.encode(texts[0])
        for literal, text in zip(literals, texts[1:], strict=True):
            ids.append(self.control[literal])
            ids += self.encode(text)
        return ids

    def parse_literals(self, text: str) -> list[int]:
        """Ids with control literals parsed, as for text that is trusted whole.

        Switches the mode for a moment: only while loading, before anybody encodes.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, a control token's literal included; b"" for an unknown id."""
        if token_id in self._literal_bytes:
            return self._literal_bytes[token_id]
        piece = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        return piece_bytes(piece) if piece is not None else b""

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to an answer: nothing for control tokens."""
        return b"" if token_id in self._control_ids else self.token_bytes(token_id)


def _as_control(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
