"""The simulated board as the module `acl`: what pyACL offers, returned as pyACL returns it.

A worker reaches it as `from edged.twin import acl`; the board is the folder named by EDGED_TWIN.
`Library` makes further processes' views, for tests. No constants, as in the real module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edged.twin.acl.desc import Mdl
from edged.twin.acl.process import Process
from edged.twin.acl.runtime import Rt
from edged.twin.acl.top import Top
from edged.twin.acl.utilities import Util


class Library(Top):
    """One process's library: its calls, and the namespaces rt, mdl and util."""

    def __init__(self, folder: Path | None = None) -> None:
        process = Process(folder)
        super().__init__(process)
        self.rt, self.mdl, self.util = Rt(process), Mdl(process), Util(process)


# The library is one per process, like the real one; it does nothing before acl.init.
_library = Library()


def __getattr__(name: str) -> Any:
    return getattr(_library, name)


def __dir__() -> list[str]:
    return [name for name in dir(_library) if not name.startswith("_")]
