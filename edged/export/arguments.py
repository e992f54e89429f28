"""The options of `edged export` and what their values may be."""

from __future__ import annotations

import argparse
from pathlib import Path

from edged.export.form import DEFAULT_SOC, DTYPES, TARGETS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="edged export",
        description="turn a GGUF file or a Hugging Face folder into a model directory",
        epilog="Memory stays below 2.5 times the embedding or one layer in float32, whichever is "
        "larger, except for the golden prompt, which runs the whole graph (--no-golden).",
    )
    add = made.add_argument
    add("--model", type=Path, required=True, help="GGUF file or Hugging Face folder")
    add("--out", type=Path, required=True, help="model directory to write")
    add("--dtype", choices=DTYPES, help="weights (default: auto for cpu, fp16 for the others)")
    add(
        *("--target",),
        choices=TARGETS,
        default="cpu",
        help="cpu: onnxruntime's own operators; onnx: plain ones; om: those compiled by atc for "
        "an Ascend NPU, or a script that does it elsewhere; twin: .om of a simulated board",
    )
    add("--name", type=_name, help="of the model, as clients see it")
    add(
        "--no-golden", dest="golden", action="store_false", help="no reference answer in model.json"
    )
    add("--progress", choices=("auto", "on", "off"), default="auto")
    gears = made.add_argument_group("an .om: its chip and its shape gears")
    gears.add_argument("--soc", default=DEFAULT_SOC, metavar=DEFAULT_SOC)
    gears.add_argument("--batch-gears", type=_sizes, default=(1, 4, 8), metavar="1,4,8")
    gears.add_argument("--context-gears", type=_sizes, default=(512, 2048), metavar="512,2048")
    gears.add_argument("--prefill-chunk", type=int, default=64, metavar="TOKENS")
    return made


def _name(text: str) -> str:
    if not 0 < len(text) <= 128 or not text.isprintable():
        raise argparse.ArgumentTypeError("1 to 128 printable characters")
    return text


def _sizes(text: str) -> tuple[int, ...]:
    """ "1,4,8" -> (1, 4, 8)."""
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("sizes are whole numbers above 0, with commas between")
    return sizes
