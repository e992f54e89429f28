"""`python -m edged.worker --engine cpu|npu --fd N`: a worker on an inherited socket.

Started by the daemon only; N is the worker's end of a socketpair.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from edged.worker import rules


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edged.worker", description="started by edged itself")
    parser.add_argument("--engine", choices=("cpu", "npu"), required=True)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socketpair")
    args = parser.parse_args(argv)
    try:
        sock = socket.socket(fileno=args.fd)
    except OSError as error:
        parser.error(f"--fd {args.fd} is not an open socket: {error.strerror}")
    rules.obey(args.engine, sock)
    # After the rules: this loads NumPy, which reads the environment they prepare.
    from edged.worker.boot import run
    from edged.worker.link import Link

    return run(Link(sock), args.engine)


if __name__ == "__main__":
    sys.exit(main())
