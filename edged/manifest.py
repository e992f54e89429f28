"""What the daemon needs of each engine's model.json: do they share ids, how much do they hold.

Two models share ids exactly when the hashes of their tokenizers are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edged.errors import ConfigError

MANIFEST_FILE = "model.json"


class Manifest(msgspec.Struct, frozen=True):
    """gears: (batch, tokens, context) compiled into an .om; empty = any shape."""

    name: str
    context_tokens: int
    tokenizer_hash: str = ""
    gears: list[tuple[int, int, int]] = []

    @property
    def longest_tokens(self) -> int:
        """The longest sequence this engine can hold."""
        contexts = [context for _, _, context in self.gears]
        return min(self.context_tokens, max(contexts, default=self.context_tokens))


def read(model_dir: Path) -> Manifest:
    """Raises ConfigError with the next step."""
    path = model_dir / MANIFEST_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; export the model again") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}; export the model again") from None


def shared_context_tokens(model_dirs: Mapping[str, Path], cap_tokens: int) -> int:
    """What a stream may hold so that every engine that shares the first one's tokenizer can carry
    it on by ids; cap_tokens > 0 lowers it. model_dirs: in the order of the chain."""
    others = foreign(model_dirs)
    longest = [read(d).longest_tokens for engine, d in model_dirs.items() if engine not in others]
    return min([*longest, cap_tokens] if cap_tokens else longest)


def check_small_model(model_dir: Path, small: Path) -> None:
    """Streams come from other rungs by ids. Raises ConfigError where ids would mean other words."""
    if read(small).tokenizer_hash != read(model_dir).tokenizer_hash:
        raise ConfigError(
            f"npu.small_model: {small} has another tokenizer than {model_dir}; export the same "
            "model once more, with shorter context gears"
        )


def foreign(model_dirs: Mapping[str, Path]) -> dict[str, Manifest]:
    """Engines whose model has another tokenizer than the first one's: they go on by text."""
    manifests = {engine: read(folder) for engine, folder in model_dirs.items()}
    first = next(iter(manifests.values()))
    return {e: m for e, m in manifests.items() if m.tokenizer_hash != first.tokenizer_hash}


def foreign_models(model_dirs: Mapping[str, Path], cap_tokens: int) -> dict[str, tuple[str, int]]:
    """Of the foreign engines: the model's name and what a sequence may hold there."""
    return {
        engine: (m.name, min(m.longest_tokens, cap_tokens or m.longest_tokens))
        for engine, m in foreign(model_dirs).items()
    }
