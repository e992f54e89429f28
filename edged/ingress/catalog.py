"""Catalog: the models a client can name, and what holds when it names little.

Filled by the app at start, read by every ingress. Holds text models only, never engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edged.errors import RequestError
from edged.settings import Generation
from edged.text.model import TextModel


@dataclass(frozen=True)
class Entry:
    """context_tokens: what the engines give a sequence, at most the model's own context.
    created_s: Unix time, as OpenAI's model list wants it."""

    text: TextModel
    context_tokens: int
    created_s: int


class Catalog:
    """Models by name, in the order given; the first one is the default."""

    def __init__(
        self,
        texts: Sequence[TextModel],
        defaults: Generation | None = None,
        context_tokens: int = 0,
    ) -> None:
        """defaults: of what a request leaves out. context_tokens: a cap; 0 = the model's own."""
        created_s = int(time.time())
        self.defaults = defaults or Generation()
        self._entries = {
            text.name: Entry(
                text, min(text.context_tokens, context_tokens or text.context_tokens), created_s
            )
            for text in texts
        }

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, name: str) -> Entry:
        """The model of that name, the default one for "".

        Raises model_not_found, or model_loading while there is none at all.
        """
        if not self._entries:
            raise RequestError("model_loading", "no model is loaded yet; ask again", None, 5)
        if not name:
            return next(iter(self._entries.values()))
        if name in self._entries:
            return self._entries[name]
        shown = name if len(name) <= 64 else name[:61] + "..."
        message = f"model {shown!r} does not exist here; this node has {', '.join(self._entries)}"
        raise RequestError("model_not_found", message, "model")
