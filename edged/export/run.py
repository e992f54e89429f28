"""One export from start to end: read, check the room, build beside the target, rename.

A directory appears under its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from edged.export import DiskError, ExportError, atc, traffic
from edged.export.arguments import parser
from edged.export.blocks import BLOCK
from edged.export.cpu import CpuGraph
from edged.export.emit import DATA_FILE, GRAPH_FILE, Emitter
from edged.export.form import Form, shape_gears
from edged.export.gguf_source import GgufSource
from edged.export.golden import Skipped, golden
from edged.export.hf_source import HfSource
from edged.export.manifest import manifest
from edged.export.plain import PlainGraph
from edged.export.precision import Precision
from edged.export.weights import CONTRIB, Weights, check_tensors
from edged.models import MANIFEST_FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 the source or the arguments cannot be used, 3 the disk cannot."""
    args = parser().parse_args(argv)
    hide_bar = {"auto": None, "on": False, "off": True}[args.progress]
    try:
        shapes = shape_gears(args.batch_gears, args.context_gears, args.prefill_chunk)
        dtype = args.dtype or ("auto" if args.target == "cpu" else "fp16")
        compiled = Form(target=args.target).compiled
        form = Form(dtype, args.target, shapes if compiled else (), args.soc)
        export(args.model, args.out, form, hide_bar, name=args.name or "", with_golden=args.golden)
    except ExportError as error:
        print(f"edged export: {error}", file=sys.stderr)
        return 3 if isinstance(error, DiskError) else 2
    return 0


def export(
    model: Path,
    out: Path,
    form: Form,
    hide_bar: bool | None = None,
    *,
    name: str = "",
    with_golden: bool = True,
) -> None:
    """Write model.onnx, model.onnx.data, tokenizer.json and model.json into `out`; of the target
    om also model.om or build_om.sh, of twin model.om alone instead of the graph.

    hide_bar: None = show the progress bar on a terminal only. Raises ExportError; `out` is
    then untouched.
    """
    form.check()
    source = open_source(model)
    if form.compiled:
        atc.check_gears(source.hyper, form.gears)
    check_tensors(source)
    with _beside(out) as folder:
        _check_room(source, folder, form)
        described = manifest(source, model, folder, form, name)  # it may refuse the tokenizer
        precision = _graph(source, folder, form, hide_bar)
        described["fp16_overflow"] = precision.overflowed
        described["golden"] = _golden(folder, described) if with_golden else None
        text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
        if form.compiled:
            weight_bytes = (folder / DATA_FILE).stat().st_size
            row_bytes = traffic.cache_row_bytes(source.hyper, form)
            _say(*traffic.table(weight_bytes, row_bytes, form))
        if form.target == "om":
            atc.compile_om(folder, out, source.hyper, form)
        if form.target == "twin":
            _pack(folder, form)


def _golden(folder: Path, described: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return golden(folder, described)
    except Skipped as reason:
        _say(f"edged export: no golden prompt: {reason}")
        return None


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _pack(folder: Path, form: Form) -> None:
    """The graph and its weights become one .om; the parts go."""
    from edged.twin import om

    try:
        om.pack_decoder(folder, folder / "model.om", form.gears, soc=form.soc)
    except om.OmError as error:
        raise ExportError(str(error)) from None
    for path in folder.glob(f"{GRAPH_FILE}*"):
        path.unlink()


def open_source(model: Path) -> GgufSource | HfSource:
    """The reader for what lies at `model`."""
    if model.is_dir():
        return HfSource(model)
    if model.is_file():
        return GgufSource(model)
    raise ExportError(f"{model} does not exist; give a GGUF file or a Hugging Face folder")


def _graph(
    source: GgufSource | HfSource, folder: Path, form: Form, hide_bar: bool | None
) -> Precision:
    total = _data_bytes(source, form)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=hide_bar) as bar,
        Emitter(folder, bar.update) as emit,
    ):
        weights = Weights(source, emit, form.recipe)
        if form.target == "cpu":
            CpuGraph(emit, weights).build()
        else:
            PlainGraph(emit, weights, form.float_type).build()
        emit.finish([CONTRIB] if form.target == "cpu" or form.recipe != "float" else [])
        bar.total = bar.n  # the estimate does not know which matrices have blocks of their own
    _say_losses(weights.precision, form)
    return weights.precision


def _say_losses(precision: Precision, form: Form) -> None:
    lines = precision.warnings()
    if form.dtype == "fp16" and precision.flushed:
        lines.append(f"{precision.flushed} weights are too small for fp16 and became 0")
    if lines:
        _say(*(f"edged export: {line}" for line in lines))


def _data_bytes(source: GgufSource | HfSource, form: Form) -> int:
    """Size of model.onnx.data, or a little more: for the progress bar and the check of room."""
    h = source.hyper
    layer = h.hidden * (2 * h.q_rows + 2 * h.kv_rows + 3 * h.ffn)
    table = h.vocab * h.hidden
    item: float = form.float_type.itemsize
    if form.recipe == "float":
        tables = table * item * (1 if h.tied else 2)
    else:
        item = 1 + 4 / BLOCK
        tables = table * (2 + item)
    return int(h.layers * layer * item + tables + 4 * h.context_tokens * h.head_dim)


def _check_room(source: GgufSource | HfSource, folder: Path, form: Form) -> None:
    copies = 2 if form.compiled else 1  # the graph's files and the .om made of them
    needed = int(copies * _data_bytes(source, form) * 1.02) + (64 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"not enough disk: {needed >> 20} MiB needed in {folder.parent}, {free >> 20} MiB "
            "free; free some or choose another --out"
        )


def _settle(folder: Path) -> None:
    """On disk before it gets its name: a power cut must not leave a whole name over half a file."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary directory next to `out` that takes its place when the block succeeds."""
    if out.exists() and not (out / MANIFEST_FILE).is_file():
        raise ExportError(f"{out} exists and is not a model directory; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise DiskError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        _settle(temporary)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            out.rename(old / "old")
            temporary.rename(out)
            shutil.rmtree(old)
        else:
            temporary.rename(out)
    except OSError as error:
        raise DiskError(f"cannot write {out}: {error.strerror}; free some disk") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
