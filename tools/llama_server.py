"""llama.cpp's own HTTP server in a process of its own, for the benches to compare with.

Prints one line, its address, when it listens; ends when standard input does. Development only
(needs xllamacpp); the product never runs it.
"""

from __future__ import annotations

import argparse
import sys

import xllamacpp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context-tokens", type=int, default=2048, help="per slot")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    server = xllamacpp.Server(parameters(arguments))
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server  # closes the listener and joins its threads
    return 0


def parameters(arguments: argparse.Namespace) -> xllamacpp.CommonParams:
    """llama.cpp at its defaults but for what must be equal on both sides of a comparison."""
    chosen = xllamacpp.CommonParams()
    chosen.model.path = arguments.model
    chosen.hostnames = ["127.0.0.1"]
    chosen.port = 0  # any free one
    chosen.n_parallel = arguments.slots
    chosen.n_ctx = arguments.slots * arguments.context_tokens
    chosen.kv_unified = False  # each slot has its own context_tokens
    chosen.cpuparams.n_threads = arguments.threads
    chosen.cpuparams_batch.n_threads = arguments.threads
    chosen.cache_ram_mib = 0  # no copies of old prompts in memory: prompts here never repeat
    chosen.ui = False
    chosen.verbosity = 0
    return chosen


if __name__ == "__main__":
    sys.exit(main())
