"""From a GGUF file or a Hugging Face folder to a model directory: `python -m edged.export`.

Runs as a short-lived process of its own (numpy, gguf, onnx); the daemon never imports it.
model.json `graph` names the flavour of the contract: "edged-graph-v2" (plain.py, new rows come
out) or "edged-graph-v2-inplace" (cpu.py, new rows are written into the bound cache).
"""

from __future__ import annotations


class ExportError(Exception):
    """The source cannot become a model directory; the message tells what to do (exit 2)."""


class DiskError(ExportError):
    """No room, or it cannot be written to: another time it may work (exit 3)."""
