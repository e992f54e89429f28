"""Builds a tokenizer from the metadata of a GGUF file (tokenizer.ggml.*)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from edged.export import ExportError
from edged.export.gguf_metadata import read_metadata
from edged.export.pretokenizers import FAMILIES, Family
from edged.export.tokenizer_parts import Parts, mark_controls

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_MODELS = {
    "llama": "SentencePiece",
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV",
}


def read_gguf(path: Path) -> Parts:
    """Raises ExportError for other kinds than byte-level BPE and for unknown families."""
    metadata = _Metadata(path)
    family = _family(metadata)
    tokens, types = _used_tokens(metadata)
    merges = [str(merge) for merge in metadata.need("merges")]
    tokenizer = _build(path, tokens, types, merges, family)
    ids = (metadata.token_id(f"{name}_token_id", tokens) for name in ("bos", "eos", "eot", "eom"))
    bos_id, eos_id, *turn_ids = ids
    return Parts(
        tokenizer=tokenizer,
        merges=merges,
        eos_ids=frozenset(i for i in (eos_id, *turn_ids) if i is not None),
        eos_id=eos_id,
        bos_id=bos_id,
        add_bos=bool(metadata.get("add_bos_token", family.add_bos)),
        chat_template=metadata.chat_template(),
    )


class _Metadata:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_metadata(path)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(_KEY + name, default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ExportError(f"{_KEY}{name} is missing in {self._path.name}; the file is damaged")
        return value

    def token_id(self, name: str, tokens: list[str]) -> int | None:
        value = self.get(name)
        return int(value) if value is not None and int(value) < len(tokens) else None

    def chat_template(self) -> str | None:
        found = self._values.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None


def _family(metadata: _Metadata) -> Family:
    model = str(metadata.get("model", "none"))
    if model != "gpt2":
        kind = _MODELS.get(model, model)
        raise ExportError(
            f"the tokenizer is {kind} ({_KEY}model = {model!r}); edged speaks byte-level BPE "
            "('gpt2'): take a model of the Llama 3, Qwen2 or SmolLM families"
        )
    pre = metadata.get("pre")
    if pre in (None, "", "default"):
        raise ExportError(
            f"the file does not say how its tokenizer cuts text ({_KEY}pre is missing or "
            "'default'); take a newer conversion of the model or its Hugging Face folder"
        )
    if pre not in FAMILIES:
        raise ExportError(
            f"unknown tokenizer family {_KEY}pre = {pre!r}; edged knows {', '.join(FAMILIES)}; "
            "try the model's Hugging Face folder, which describes its tokenizer in full"
        )
    return FAMILIES[str(pre)]


def _used_tokens(metadata: _Metadata) -> tuple[list[str], list[int]]:
    """Tokens and types by id, without the padding at the end of some vocabularies."""
    tokens = [str(token) for token in metadata.need("tokens")]
    types = [int(kind) for kind in metadata.need("token_type")]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ExportError("the token list of the GGUF file is damaged; fetch it again")
    while types and types[-1] == _UNUSED:
        types.pop()
    return tokens[: len(types)], types


def _build(
    path: Path, tokens: list[str], types: list[int], merges: list[str], family: Family
) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=family.ignore_merges))
    # tokenizers raises Exception itself when vocabulary and merges do not fit.
    except Exception as error:  # noqa: BLE001
        raise ExportError(f"the tokenizer in {path.name} is damaged: {error}") from None
    tokenizer.pre_tokenizer = family.pre_tokenizer()
    if family.normalizer is not None:
        tokenizer.normalizer = family.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind in (_CONTROL, _UNKNOWN)
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )
    mark_controls(tokenizer)
    return tokenizer
