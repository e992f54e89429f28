"""API keys: a file of `name:sha256` lines. Holds digests only; a key itself is never stored."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from edged.errors import ConfigError, RequestError

_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64}):([0-9a-fA-F]{64})")


class ApiKeys:
    def __init__(self, digests: dict[str, str]) -> None:
        """digests: key name -> lower-case hex SHA-256 of the key."""
        self._digests = digests

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """Raises ConfigError naming the line."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"http.api_keys_file: cannot read {path}: {error}") from None
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None or match[1] in digests:
                raise ConfigError(
                    f"http.api_keys_file: line {number} of {path} is not name:sha256 with a name "
                    "of its own; make one with: printf %s KEY | sha256sum"
                )
            digests[match[1]] = match[2].lower()
        if not digests:
            raise ConfigError(f"http.api_keys_file: {path} holds no key; add a name:sha256 line")
        return cls(digests)

    def check(self, authorization: str | None) -> str:
        """The name of the key in an Authorization header. Raises unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        # Every entry is compared, so that the time taken tells nothing.
        names = [n for n, known in self._digests.items() if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not names:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise RequestError("unauthorized", message)
        return names[0]
