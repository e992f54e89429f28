"""Faults to order: a small JSON file beside the twin's state, consumed by the acl surface.

Anyone may add a fault while a worker runs; each one fires on the n-th event of its kind from
then on, across worker restarts. `main` is the command line: `edged twin KIND ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import msgspec

from edged.errors import ConfigError
from edged.machine import default_state_dir
from edged.twin.fields import StateError
from edged.twin.state import TwinState

FAULTS_FILE = "faults.json"
Event = Literal["allocation", "launch", "step", "load", "call", "standing"]
Kind = Literal["oom", "hang", "aicore-fault", "lost", "nan", "slow-load", "reclaim"]
_HELP = {
    "oom": "the n-th allocation or execute from now finds no memory",
    "hang": "the n-th execute from now does not end (for --seconds, else until the op time-out)",
    "aicore-fault": "the n-th execute from now is an AI Core exception; the process is done for",
    "lost": "the device stops answering at the n-th call from now",
    "nan": "the n-th execute from now writes NaN into its floating-point results",
    "slow-load": "the next load takes at least --seconds",
    "reclaim": "buffers unused for --seconds are taken away, until `clear`",
}


class Fault(msgspec.Struct):
    """after: fires on the n-th event; times: how often, 0 = until cleared; row: -1 = all rows."""

    kind: Kind
    at: Event
    after: int = 1
    times: int = 1
    seconds: float = 0.0
    row: int = -1


class Faults:
    """The fault file of one twin."""

    def __init__(self, state: TwinState) -> None:
        self._state = state
        self._path = state.folder / FAULTS_FILE
        self._lock = state.folder / ".faults.lock"
        self._seen = 0.0
        self._cached: list[Fault] = []

    def pending(self) -> list[Fault]:
        """What is ordered; the file is read again only when it changed."""
        version = self._state.get("faults_version")
        if version != self._seen:
            self._cached = msgspec.json.decode(self._path.read_bytes(), type=list[Fault])
            self._seen = version
        return self._cached

    def due(self, event: Event) -> list[Fault]:
        """An event happens: the faults that fire on it, consumed."""
        if not any(fault.at == event for fault in self.pending()):
            return []
        fired = []
        with self._changing() as faults:
            for fault in [f for f in faults if f.at == event]:
                fault.after -= 1
                if fault.after > 0:
                    continue
                fired.append(fault)
                fault.after = 1
                fault.times -= 1
                if fault.times == 0:
                    faults.remove(fault)
                fault.times = max(fault.times, 0)
        return fired

    def standing(self, kind: Kind) -> Fault | None:
        """A fault that holds until it is cleared."""
        return next((f for f in self.pending() if f.at == "standing" and f.kind == kind), None)

    def add(self, fault: Fault) -> None:
        with self._changing() as faults:
            faults.append(fault)

    def clear(self) -> None:
        with self._changing() as faults:
            faults.clear()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Fault]]:
        """Read, change, replace; one process at a time, nobody sees half a file."""
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            faults = self.pending()
            yield faults
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".faults-")
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(faults))
            Path(temporary).replace(self._path)
            self._state.add("faults_version", 1)


_FIELDS = {
    "pace": ("time_scale", "an execute lasts NUMBER times its modelled time at least; 0 = native"),
    "resistance": ("resistance", "cooling is NUMBER times worse: 1.6 is a fan that failed"),
    "fan": ("fan_ratio", "the fan runs at NUMBER, 0 to 1"),
}

# --- command line --------------------------------------------------------------------------------


def default_folder() -> Path:
    """Where `edged run --twin` keeps its board."""
    return Path(os.environ.get("EDGED_TWIN") or default_state_dir() / "twin")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 wrong usage or no twin."""
    args = _parser().parse_args(argv)
    folder = args.twin or default_folder()
    try:
        state = TwinState(folder)
    except (StateError, ConfigError) as error:
        print(f"edged twin: {error}", file=sys.stderr)
        return 2
    with contextlib.closing(state):
        _obey(args, state, Faults(state))
    return 0


def _obey(args: argparse.Namespace, state: TwinState, faults: Faults) -> None:
    now_s = time.monotonic()
    if args.verb == "heat":
        state.set_temperature(now_s, args.celsius)
    elif args.verb == "ambient":
        state.set_ambient(now_s, args.celsius)
    elif args.verb in _FIELDS:
        state.command(now_s, {_FIELDS[args.verb][0]: args.number})
    elif args.verb == "clear":
        faults.clear()
    elif args.verb == "status":
        ordered = [msgspec.to_builtins(f) for f in faults.pending()]
        about = {"board": state.board.name, **state.fields(), **asdict(state.sample(now_s))}
        print(json.dumps({**about, "faults": ordered}, indent=1))
    else:
        faults.add(ordered_fault(args))


def ordered_fault(args: argparse.Namespace) -> Fault:
    fixed: dict[str, Event] = {"lost": "call", "slow-load": "load", "reclaim": "standing"}
    at: Event = fixed.get(args.verb, "step")
    if args.verb == "oom":
        at = "launch" if args.at == "step" else "allocation"
    return Fault(args.verb, at, args.after, args.times, args.seconds, args.row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edged twin", description="command the simulated board")
    parser.add_argument("--twin", type=Path, help="its folder (default: the running daemon's)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for kind, text in _HELP.items():
        verb = verbs.add_parser(kind, help=text, description=text)
        verb.add_argument("--after", type=_count, default=1, help="n (default 1: the next)")
        verb.add_argument("--times", type=int, default=1, help="how often; 0 = until clear")
        needs_time = kind in ("slow-load", "reclaim")
        verb.add_argument("--seconds", type=_seconds, default=0.0, required=needs_time)
        verb.add_argument("--row", type=int, default=-1, help="of a batch (default: all)")
        if kind == "oom":
            verb.add_argument("--at", choices=("allocation", "step"), default="allocation")
    for kind, text in (("heat", "the die jumps to CELSIUS"), ("ambient", "the room has CELSIUS")):
        verbs.add_parser(kind, help=text).add_argument("celsius", type=float)
    for kind, (_, text) in _FIELDS.items():
        verbs.add_parser(kind, help=text).add_argument("number", type=_number)
    verbs.add_parser("clear", help="forget all faults that have not fired")
    verbs.add_parser("status", help="counters, temperature and ordered faults as JSON")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count from 1 on")
    return number


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return number


if __name__ == "__main__":
    sys.exit(main())
