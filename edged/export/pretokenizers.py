"""How each byte-level BPE family cuts text before merging, keyed by GGUF's tokenizer.ggml.pre.

The patterns are those of the models' own tokenizer.json files; each is checked against
llama.cpp in tests/test_tokenizer_families.py. A name that is not here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


@dataclass(frozen=True)
class Family:
    """add_bos: what holds when the file does not say. normalizer: None = text as it is."""

    pre_tokenizer: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        cut = Split(Regex(pattern), behavior="isolated", invert=False)
        return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_GPT2_FAMILY = Family(_gpt2)
_SMOLLM_FAMILY = Family(_single_digits)
_LLAMA3_FAMILY = Family(_split(_LLAMA3), ignore_merges=True, add_bos=True)
# Qwen composes characters first; llama.cpp does not, so decomposed text differs there.
_QWEN2_FAMILY = Family(_split(_QWEN2), normalizer=NFC)

FAMILIES: Mapping[str, Family] = {
    "gpt-2": _GPT2_FAMILY,
    "phi-2": _GPT2_FAMILY,
    "smollm": _SMOLLM_FAMILY,
    "starcoder": _SMOLLM_FAMILY,
    "refact": _SMOLLM_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
}
