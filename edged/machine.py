"""What the machine gives where the configuration is silent: state folder and node name."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from pathlib import Path


def default_state_dir() -> Path:
    """systemd's StateDirectory, else $XDG_STATE_HOME/edged, else ~/.local/state/edged."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "edged"


def default_node() -> str:
    """Host name + a stable suffix: all vendor images share one host name.

    The suffix comes from /etc/machine-id (hashed: the id itself should not be published).
    """
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    if machine in ("", "uninitialized"):  # the word systemd leaves there until the first boot ends
        machine = str(uuid.getnode())
    suffix = hashlib.sha256(b"edged" + machine.encode()).hexdigest()[:6]
    host = re.sub(r"[^a-z0-9_-]", "-", socket.gethostname().lower().split(".")[0])[:25] or "edged"
    return f"{host}-{suffix}"
