"""Describes a model directory: the model.json beside the graph.

What the worker checks at load and what the daemon needs to know without opening a graph.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import edged
from edged.export._tokenizer_fallback import TokenizerInfo, export_tokenizer
from edged.export.gguf_source import GgufSource
from edged.export.hf_source import HfSource
from edged.models import EXPORTER_VERSION

CONTRACT = "edged-graph"
CONTRACT_VERSION = 2
TOKENIZER_FILE = "tokenizer.json"
# Control tokens that end a turn, whatever the file names as its end-of-sequence token.
_ENDS = frozenset(
    (
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|eot|>",
        "</s>",
    )
)


def manifest(
    source: GgufSource | HfSource, model: Path, folder: Path, dtype: str
) -> dict[str, Any]:
    """The content of model.json. Writes tokenizer.json into `folder` on the way."""
    text = export_tokenizer(model, folder)
    h = source.hyper
    return {
        "contract": CONTRACT,
        "version": CONTRACT_VERSION,
        "graph": f"{CONTRACT}-v{CONTRACT_VERSION}",
        "name": h.name,
        "architecture": h.architecture,
        "layers": h.layers,
        "hidden": h.hidden,
        "heads": h.heads,
        "kv_heads": h.kv_heads,
        "head_dim": h.head_dim,
        "vocab": h.vocab,
        "tokenizer_vocab": text.vocab_size,
        "context_tokens": h.context_tokens,
        "weights_dtype": dtype,
        "cache_dtype": "fp16" if dtype == "fp16" else "fp32",
        "rope": {"theta": h.rope.theta, "scaling": h.rope.scaling},
        "eos_ids": eos_ids(folder, text),
        "bos_id": text.bos_id,
        "add_bos": text.add_bos,
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "chat_template": text.chat_template,
        "source": {
            "file": model.name,
            "sha256": _sha256(source.paths),
        },
        "tokenizer_sha256": _sha256([folder / TOKENIZER_FILE]),
        "exporter_version": EXPORTER_VERSION,
        "edged_version": edged.__version__,
    }


def eos_ids(folder: Path, text: TokenizerInfo) -> list[int]:
    """The file's own end tokens and every control token that ends a turn, ascending."""
    added = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))["added_tokens"]
    known = {item["id"] for item in added if item["special"] and item["content"] in _ENDS}
    return sorted(known | set(text.eos_ids))


def _sha256(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
