"""Describes a model directory: the model.json beside the graph.

What the worker checks at load and what the daemon needs to know without opening a graph.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import edged
from edged.export.form import Form
from edged.export.gguf_source import GgufSource
from edged.export.hf_source import HfSource
from edged.export.tokenizer import TOKENIZER_FILE, export_tokenizer
from edged.models import EXPORTER_VERSION

CONTRACT = "edged-graph"
CONTRACT_VERSION = 2


def manifest(
    source: GgufSource | HfSource, model: Path, folder: Path, form: Form, name: str = ""
) -> dict[str, Any]:
    """The content of model.json. Writes tokenizer.json into `folder` on the way.

    name: instead of the source's own.
    """
    text = export_tokenizer(model, folder)
    h = source.hyper
    return {
        "contract": CONTRACT,
        "version": CONTRACT_VERSION,
        "graph": form.graph,
        "name": name or h.name,
        "architecture": h.architecture,
        "layers": h.layers,
        "hidden": h.hidden,
        "heads": h.heads,
        "kv_heads": h.kv_heads,
        "head_dim": h.head_dim,
        "vocab": h.vocab,
        "tokenizer_vocab": text.vocab_size,
        "context_tokens": h.context_tokens,
        "weights_dtype": form.dtype,
        "gears": form.gears,
        "soc": form.soc if form.compiled else None,
        "cache_dtype": "fp16" if form.dtype == "fp16" else "fp32",
        "rope": {"theta": h.rope.theta, "scaling": h.rope.scaling},
        "eos_ids": list(text.eos_ids),
        "bos_id": text.bos_id,
        "add_bos": text.add_bos,
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "chat_template": text.chat_template,
        "source": {
            "file": model.name,
            "stored_as": source.stored_as,
            "sha256": _sha256(source.paths),
        },
        "tokenizer_sha256": _sha256([folder / TOKENIZER_FILE]),
        "tokenizer_hash": text.tokenizer_hash,
        "exporter_version": EXPORTER_VERSION,
        "edged_version": edged.__version__,
    }


def _sha256(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
