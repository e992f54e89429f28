"""Reads a model directory: model.json and tokenizer.json to the parts of a TextModel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from edged.errors import ConfigError
from edged.text.chat import Chat
from edged.text.tokens import Tokens

MANIFEST_FILE = "model.json"
TOKENIZER_FILE = "tokenizer.json"


class _Manifest(msgspec.Struct, frozen=True):
    """The text side of model.json; other fields belong to the worker."""

    name: str
    context_tokens: int
    tokenizer_vocab: int
    eos_ids: list[int]
    bos_id: int | None = None
    add_bos: bool = False
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    tokenizer_hash: str = ""


@dataclass(frozen=True)
class Card:
    """What a TextModel says about its model."""

    name: str
    context_tokens: int
    vocab_tokens: int
    eos_ids: frozenset[int]
    tokenizer_hash: str


def load_parts(model_dir: Path, clock: Callable[[], datetime]) -> tuple[Card, Tokens, Chat]:
    """Raises ConfigError with the next step."""
    manifest = _manifest(model_dir / MANIFEST_FILE)
    path = model_dir / TOKENIZER_FILE
    try:
        data = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(data)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    # tokenizers raises Exception itself for every kind of malformed file; ours is the same answer.
    except Exception as error:  # noqa: BLE001
        raise _unusable(path, str(error)) from None
    size = manifest.tokenizer_vocab
    if tokenizer.id_to_token(size - 1) is None or tokenizer.id_to_token(size) is not None:
        raise _unusable(path, f"it does not have the {size} tokens {MANIFEST_FILE} speaks of")
    start_ids = (manifest.bos_id,) if manifest.add_bos and manifest.bos_id is not None else ()
    tokens = Tokens(tokenizer, manifest.context_tokens, start_ids)
    chat = Chat(
        tokens,
        manifest.chat_template or None,
        manifest.bos_token or "",
        manifest.eos_token or "",
        clock,
    )
    card = Card(
        name=manifest.name,
        context_tokens=manifest.context_tokens,
        vocab_tokens=size,
        eos_ids=frozenset(manifest.eos_ids),
        tokenizer_hash=manifest.tokenizer_hash or hashlib.sha256(data).hexdigest(),
    )
    return card, tokens, chat


def _manifest(path: Path) -> _Manifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from None
    if manifest.tokenizer_vocab < 1 or manifest.context_tokens < 1:
        raise _unusable(path, "tokenizer_vocab and context_tokens must be at least 1")
    return manifest


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot use {path}: {why}; run `edged export --model MODEL --out {path.parent}` again"
    )
