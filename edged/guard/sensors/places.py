"""Places: where the driver's library and tool usually are. Looks, never loads or runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_LIBRARY = "libdcmi.so"
_LIBRARY_FOLDERS = (
    "/usr/lib64",  # images of 310B boards
    "/usr/local/Ascend/driver/lib64/driver",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/lib64/common",
    "/usr/local/dcmi",
)
_TOOL = "npu-smi"
_TOOL_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")


def dcmi_library(configured: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Path of libdcmi.so, or None."""
    if configured:
        return configured if Path(configured).is_file() else None
    searched = [*environ.get("LD_LIBRARY_PATH", "").split(":"), *_LIBRARY_FOLDERS]
    paths = (Path(folder) / _LIBRARY for folder in searched if folder)
    return next((str(path) for path in paths if path.is_file()), None)


def loader_path(environ: Mapping[str, str] = os.environ) -> str:
    """LD_LIBRARY_PATH for what uses the driver: ours, then where its libraries are. systemd
    gives none, and the library finds its own parts no other way."""
    own = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return ":".join((*own, *(f for f in _LIBRARY_FOLDERS if f not in own)))


def npu_smi(configured: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Path of the tool, or None."""
    if configured:
        return shutil.which(configured, path=environ.get("PATH"))
    searched = ":".join((environ.get("PATH", ""), *_TOOL_FOLDERS)).strip(":")
    return shutil.which(_TOOL, path=searched)
