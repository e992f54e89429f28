"""tokenizer.json and what goes with it, from a GGUF file or a Hugging Face folder.

Byte-level BPE families only; others are refused by name, never approximated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from edged.export import ExportError
from edged.export.pretokenizers import FAMILIES
from edged.export.tokenizer_gguf import read_gguf
from edged.export.tokenizer_hf import read_hf
from edged.export.tokenizer_parts import Parts
from edged.text.vocabulary import vocabulary_hash

__all__ = ["FAMILIES", "TOKENIZER_FILE", "TokenizerInfo", "export_tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
# Control tokens that end a turn, whatever the file names as its end-of-sequence token.
_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<|eot|>", "<EOT>", "<end_of_turn>", "<|return|>", "<|end\u2581of\u2581sentence|>", "</s>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


@dataclass(frozen=True)
class TokenizerInfo:
    """What model.json says about the tokenizer.

    vocab_size: highest id + 1. eos_ids: every id that ends an answer, ascending.
    tokenizer_hash: identity of (id -> bytes, type, merges), whatever file it came from.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tokenizer_hash: str


def export_tokenizer(source: Path, out_dir: Path) -> TokenizerInfo:
    """Write out_dir/tokenizer.json from a GGUF file or a Hugging Face folder.

    Raises ExportError for a tokenizer edged does not speak or a damaged source.
    """
    parts = read_hf(source) if source.is_dir() else read_gguf(source)
    tokenizer = parts.tokenizer
    parts.tokenizer.save(str(out_dir / TOKENIZER_FILE), pretty=False)
    added = tokenizer.get_added_tokens_decoder()
    control = {token.content: i for i, token in added.items() if token.special}
    eos_ids = set(parts.eos_ids) | {control[text] for text in _ENDS if text in control}
    if not eos_ids:
        raise ExportError(f"{source} names no end-of-sequence token; answers would never end")
    return TokenizerInfo(
        vocab_size=max(*tokenizer.get_vocab(with_added_tokens=True).values(), *added) + 1,
        eos_ids=tuple(sorted(eos_ids)),
        bos_id=parts.bos_id,
        add_bos=parts.add_bos and parts.bos_id is not None,
        bos_token=_literal(tokenizer, parts.bos_id),
        eos_token=_literal(tokenizer, parts.eos_id),
        chat_template=parts.chat_template,
        tokenizer_hash=_hash(parts),
    )


def _literal(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    text: str | None = None if token_id is None else tokenizer.id_to_token(token_id)
    return text


def _hash(parts: Parts) -> str:
    added = parts.tokenizer.get_added_tokens_decoder()
    return vocabulary_hash(
        parts.tokenizer.get_vocab(with_added_tokens=False),
        [(i, token.content, token.special) for i, token in added.items()],
        parts.merges,
    )
