"""Detokenizer: token ids to text, whole characters only, in the order they are drawn.

Exact for byte-level BPE: the text is the UTF-8 decoding of the tokens' bytes in a row.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_LONGEST_CHARACTER_BYTES = 4


class Detokenizer:
    """One stream's text. Malformed UTF-8 becomes U+FFFD as soon as it is certain; never raises.

    What push returned so far plus what flush returns equals the decoding of all ids at once.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], prompt_ids: Sequence[int] = ()) -> None:
        """bytes_of: what a token adds to the text (b"" for control and unknown ids).

        prompt_ids: ids before the first push. Their text is not emitted, but a character
        they leave unfinished is completed by the pushes.
        """
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._tail(prompt_ids))

    def push(self, ids: Sequence[int]) -> str:
        """Text these ids complete; "" while a character is unfinished."""
        return self._decoder.decode(b"".join([self._bytes_of(token_id) for token_id in ids]))

    def flush(self) -> str:
        """At the end of the stream: U+FFFD if it ends inside a character, else ""."""
        return self._decoder.decode(b"", True)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """The last bytes of the ids, enough to hold an unfinished character."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
        return tail
