"""Minimal stand-in until edged.export.tokenizer exists: byte-level BPE of one family only."""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from edged.export import ExportError


@dataclass(frozen=True)
class TokenizerInfo:
    vocab_size: int
    bos_id: int | None
    add_bos: bool
    bos_token: str
    eos_token: str
    eos_ids: tuple[int, ...]
    chat_template: str


def export_tokenizer(source: Path, out_dir: Path) -> TokenizerInfo:
    reader = gguf.GGUFReader(source)

    def field(key: str, default: object = None) -> object:
        found = reader.fields.get(f"tokenizer.{key}")
        return default if found is None else found.contents()

    if field("ggml.pre") != "smollm":
        raise ExportError(f"tokenizer {field('ggml.pre')!r} is not supported")
    tokens: list[str] = field("ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field("ggml.merges")]
    tok = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    types: list[int] = field("ggml.token_type")
    tok.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == 3
        ]
    )
    tok.save(str(out_dir / "tokenizer.json"))
    bos, eos = field("ggml.bos_token_id"), field("ggml.eos_token_id")
    return TokenizerInfo(
        vocab_size=len(tokens),
        bos_id=bos,
        add_bos=bool(field("ggml.add_bos_token", False)),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[eos],
        eos_ids=(eos,),
        chat_template=str(field("chat_template", "")),
    )
