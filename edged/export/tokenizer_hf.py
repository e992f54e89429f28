"""Takes the tokenizer of a Hugging Face folder: tokenizer.json and its configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edged.export import ExportError
from edged.export.tokenizer_parts import Parts, mark_controls


def read_hf(folder: Path) -> Parts:
    """Raises ExportError for other kinds than byte-level BPE."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ExportError(
            f"{path} is missing; fetch the model's tokenizer.json too (a folder with only "
            "tokenizer.model has a SentencePiece tokenizer, which edged does not speak)"
        )
    described = _json(path)
    _check_kind(described)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(described))
    # tokenizers raises Exception itself for every kind of malformed file.
    except Exception as error:  # noqa: BLE001
        raise ExportError(f"cannot use {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    mark_controls(tokenizer)
    config = _json(folder / "tokenizer_config.json", optional=True)
    bos_id = _special_id(tokenizer, config.get("bos_token"))
    eos_id = _special_id(tokenizer, config.get("eos_token"))
    named = [_json(folder / name, optional=True) for name in _EOS_FILES]
    eos_ids = {i for found in named for i in _ids(found.get("eos_token_id"))}
    return Parts(
        tokenizer=tokenizer,
        merges=[_merge(merge) for merge in described["model"]["merges"]],
        eos_ids=frozenset(eos_ids | ({eos_id} if eos_id is not None else set())),
        eos_id=eos_id,
        bos_id=bos_id,
        add_bos=bool(config.get("add_bos_token", _adds_bos(tokenizer, bos_id))),
        chat_template=_chat_template(folder, config),
    )


_EOS_FILES = ("generation_config.json", "config.json")


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ExportError(f"{path} is missing; fetch the whole folder") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ExportError(f"cannot use {path}: it is not a JSON object")
    return value


def _check_kind(described: dict[str, Any]) -> None:
    model = described.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    decoder = json.dumps(described.get("decoder"))
    if kind != "BPE" or not isinstance(model, dict):
        raise ExportError(f"the tokenizer is {kind}; edged speaks byte-level BPE only")
    if model.get("byte_fallback") or '"ByteLevel"' not in decoder:
        raise ExportError(
            "the tokenizer is BPE in SentencePiece style (no ByteLevel decoder); edged speaks "
            "byte-level BPE only: take a model of the Llama 3, Qwen2 or SmolLM families"
        )


def _special_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """token: "<s>", {"content": "<s>", ...} or None."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return found


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [item for item in found if isinstance(item, int) and not isinstance(item, bool)]


def _adds_bos(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    return bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]


def _merge(merge: Any) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The file of its own if there is one, else the (default) entry of the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
