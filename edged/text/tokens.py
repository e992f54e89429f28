"""Tokens: one tokenizer in plain mode, where only marks become control tokens.

Encoding text never yields a control token; that is checked on the way out, not only trusted.
The mode is set once, so encoding is safe from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from edged.errors import RequestError
from edged.text.vocabulary import looks_control, piece_bytes

# Above this many characters a text is encoded with the interpreter lock released.
LONG_CHARS = 4096
# A prompt is refused unread when its first characters alone overflow the context: this many
# characters per token of the context are tried, and the excess must be beyond doubt.
_TRIAL_CHARS_PER_TOKEN = 8
_BEYOND_DOUBT = 1.25


class Tokens:
    """control: literal -> id of the control tokens. start_ids: (bos,) where the model wants it.

    Added tokens that are not control tokens (<tool_call>, <think>, runs of blanks) are part of
    the text's vocabulary wherever they come from, as in llama.cpp and Hugging Face.

    context_tokens: bounds the work on a hopelessly long text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_tokens: int, start_ids: tuple[int, ...] = ()
    ) -> None:
        added = tokenizer.get_added_tokens_decoder()
        unmarked = [t for t in added.values() if not t.special and looks_control(t.content)]
        if unmarked:
            tokenizer.add_special_tokens([_as_control(token) for token in unmarked])
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
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
        """Ids of plain text; literals of control tokens are text too.

        Raises RequestError("context_length_exceeded") for a text far beyond the context.
        """
        if not text:
            return []
        self._refuse_hopeless(text)
        ids = self._raw_ids(text)
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

    def _raw_ids(self, text: str) -> list[int]:
        # Only the batch call releases the interpreter lock; a long text would stop the loop.
        if len(text) > LONG_CHARS:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _refuse_hopeless(self, text: str) -> None:
        trial_chars = max(LONG_CHARS, _TRIAL_CHARS_PER_TOKEN * self._context_tokens)
        if len(text) <= trial_chars:
            return
        count = len(self._raw_ids(text[:trial_chars]))
        if count > _BEYOND_DOUBT * self._context_tokens:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has more than {count} tokens but the model's context is "
                f"{self._context_tokens} tokens; shorten it",
            )

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, a control token's literal included; b"" for an unknown id."""
        if token_id in self._literal_bytes:
            return self._literal_bytes[token_id]
        piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
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
