"""What the daemon needs of each engine's model.json: do they share ids, how much do they hold."""

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
    """What a stream may hold so that every engine of the chain can carry it on; cap_tokens > 0
    lowers it. Raises ConfigError when their models do not share one tokenizer."""
    manifests = {engine: read(folder) for engine, folder in model_dirs.items()}
    hashes = {manifest.tokenizer_hash for manifest in manifests.values()}
    if len(hashes) > 1:
        names = ", ".join(f"{engine}: {m.name}" for engine, m in manifests.items())
        raise ConfigError(
            f"engines.chain: the engines' models differ in their tokenizers ({names}), so none "
            "can carry on what another began; give them exports of one model"
        )
    longest = [manifest.longest_tokens for manifest in manifests.values()]
    return min([*longest, cap_tokens] if cap_tokens else longest)
