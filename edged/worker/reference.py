"""The answer an engine is held to: from model.json, else what it said at its first start.

A recorded answer is kept in a file of its own per graph file and library version, so that
another graph, or another driver, begins a new one. Never runs a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from edged.worker.contract import MANIFEST_FILE, ContractError, ModelSpec
from edged.worker.rules import log

_PROMPT_TOKENS = 8
_STRIDE = 7919  # a prime: the ids of the made-up prompt lie apart in any vocabulary
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
_KEPT = 32  # recorded answers


class Golden(msgspec.Struct, frozen=True):
    """prompt_ids, and per token said after it the likeliest [id, natural log], best first."""

    prompt_ids: list[int]
    tokens: list[int]
    top_logprobs: list[list[tuple[int, float]]]

    def trouble(self, vocab_tokens: int) -> str:
        """What is wrong with it, in words; empty when it can be used."""
        if not self.prompt_ids or not self.tokens or len(self.tokens) != len(self.top_logprobs):
            return "it has no prompt, or not a list of likely ids for each token"
        if not all(0 <= i < vocab_tokens for i in (*self.prompt_ids, *self.tokens)):
            return f"an id is outside 0..{vocab_tokens - 1}"
        if any(t not in dict(top) for t, top in zip(self.tokens, self.top_logprobs, strict=True)):
            return "a token is not among its own likely ids"
        return ""


class _Manifest(msgspec.Struct):
    golden: Golden | None = None


def of_model(spec: ModelSpec) -> Golden | None:
    """What the exporter wrote; None where it could not. Raises ContractError."""
    path = spec.folder / MANIFEST_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Manifest).golden
        trouble = found.trouble(spec.vocab_tokens) if found else ""
    except OSError as error:
        raise ContractError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        trouble = str(error)
    if trouble:
        raise ContractError(f"{path}: golden: {trouble}; run `edged export` again")
    return found


def made_up_prompt(spec: ModelSpec, room_tokens: int) -> list[int]:
    """Ids for a model whose tokenizer is not at hand: at most half of the room."""
    count = max(1, min(_PROMPT_TOKENS, room_tokens // 2))
    usable = [i for i in range(min(spec.vocab_tokens, 1 << 16)) if i not in spec.eos_ids] or [0]
    return [usable[(k + 1) * _STRIDE % len(usable)] for k in range(count)]


class Store:
    """The file of one recorded answer. Every failure is logged and means "none recorded"."""

    def __init__(self, folder: Path, spec: ModelSpec, library: str) -> None:
        self._path = folder / f"golden-{_fingerprint(spec, library)}.json"
        self._vocab_tokens = spec.vocab_tokens

    def read(self) -> Golden | None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Golden)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log(f"cannot use {self._path}: {error}; it is recorded anew")
            return None
        trouble = found.trouble(self._vocab_tokens)
        if trouble:
            log(f"cannot use {self._path}: {trouble}; it is recorded anew")
        return None if trouble else found

    def write(self, golden: Golden) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, msgspec.json.encode(golden))
            self._prune()
        except OSError as error:
            log(f"cannot record the golden answer in {self._path}: {error.strerror}")
        else:
            log(f"recorded this engine's answer in {self._path}: later starts must agree")

    def _prune(self) -> None:
        """The oldest go."""
        paths = self._path.parent.glob("golden-*.json")
        for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True)[_KEPT:]:
            path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """At once or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".golden")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _fingerprint(spec: ModelSpec, library: str) -> str:
    """Of the library's version, the description, and samples of the graph and its data: to read
    all of a large file at every start would cost more than the test."""
    found = hashlib.sha256(library.encode())
    found.update((spec.folder / MANIFEST_FILE).read_bytes())
    for path in sorted(spec.folder.glob(spec.graph_file + "*")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()[:32]
