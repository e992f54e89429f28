"""What the ids of a byte-level BPE tokenizer mean: bytes, control tokens, identity.

Pure facts about a vocabulary; encoding and decoding live in their own modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself if printable Latin-1, else 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF: Mapping[str, int] = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """Bytes of one vocabulary entry written in the byte alphabet; other text is its UTF-8."""
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def looks_control(literal: str) -> bool:
    """True for names like <|im_end|>, which some files forget to mark as control tokens.

    The same rule turns them into control tokens when a model is converted for llama.cpp.
    """
    if literal in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or literal.startswith("<unused"):
        return True
    # U+FF5C is the wide bar of DeepSeek's tokens.
    return literal.startswith(("<|", "<\uff5c")) and literal.endswith(("|>", "\uff5c>"))


def vocabulary_hash(
    pieces: Mapping[str, int], added: Iterable[tuple[int, str, bool]], merges: Iterable[str]
) -> str:
    """Identity of a tokenizer: hex SHA-256 over (id, bytes, type) and the merges in order.

    pieces: byte-alphabet entry -> id. added: (id, literal, is control). merges: "left right".
    Equal hashes mean that ids can pass between two models' engines unchanged.
    """
    table = {token_id: (piece_bytes(piece), b"n") for piece, token_id in pieces.items()}
    for token_id, literal, control in added:
        table[token_id] = (literal.encode("utf-8"), b"c" if control else b"u")
    digest = hashlib.sha256()
    for token_id in sorted(table):
        text, kind = table[token_id]
        digest.update(b"%d %s %d " % (token_id, kind, len(text)) + text + b"\n")
    for merge in merges:
        digest.update(merge.encode("utf-8") + b"\n")
    return digest.hexdigest()
