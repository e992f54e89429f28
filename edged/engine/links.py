"""Links: the chain as the scheduler sees it. Starts nothing.

An engine of this node that shares the first one's tokenizer is a link as it is; one that does not
is a link by text, as the upstream server is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from edged.engine import Engine, Link
from edged.engine.foreign import ForeignEngine
from edged.engine.upstream import UpstreamEngine
from edged.engine.upstream.dial import dial_of
from edged.settings import Config
from edged.text.model import TextModel

log = structlog.get_logger("edged")


def make_links(
    config: Config,
    engines: Sequence[Engine],
    upstream: UpstreamEngine | None,
    foreign: Mapping[str, tuple[str, int]],
    model_dirs: Mapping[str, Path],
) -> tuple[Link, ...]:
    """In the order of the chain. foreign: (model, context in tokens) of engines with another
    tokenizer. Raises ConfigError for a model folder that cannot be used."""
    links: dict[str, Link] = {} if upstream is None else {upstream.name: upstream}
    for engine in engines:
        if engine.name in foreign:
            model, context_tokens = foreign[engine.name]
            text = TextModel.load(model_dirs[engine.name], model)
            links[engine.name] = ForeignEngine(engine, text, context_tokens)
        else:
            links[engine.name] = engine
    return tuple(links[name] for name in config.engines.chain if name in links)


def make_upstream(config: Config) -> UpstreamEngine | None:
    """None when the chain does not name it. Raises ConfigError naming the key."""
    if "openai" not in config.engines.chain:
        return None
    dial = dial_of(config.upstream)
    host = urlsplit(config.upstream.url).hostname or ""
    if dial.api_key and dial.tls is None and host not in ("localhost", "127.0.0.1", "::1"):
        log.warning("api_key_in_clear", why="upstream.url is http: who listens can read the key")
    return UpstreamEngine(config.upstream, dial)
