"""What a step of each shape gear will read, and what batching gains by it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from edged.export.form import Form
from edged.export.hyper import Hyper


def step_bytes(weight_bytes: int, row_bytes: int, batch: int, context: int) -> int:
    """Bytes read per step: the weights once, the cache of every sequence at its gear's length.

    row_bytes: one token's cache rows, R*D*itemsize with R = 2*L*Hk.
    """
    return weight_bytes + batch * context * row_bytes


def batch_gain(weight_bytes: int, row_bytes: int, batch: int, context: int) -> float:
    """Tokens/s of a batch over those of one sequence, if memory is the bottleneck."""
    alone = step_bytes(weight_bytes, row_bytes, 1, context)
    return batch * alone / step_bytes(weight_bytes, row_bytes, batch, context)


def cache_row_bytes(hyper: Hyper, form: Form) -> int:
    return 2 * hyper.layers * hyper.kv_rows * form.float_type.itemsize


def table(weight_bytes: int, row_bytes: int, form: Form) -> Sequence[str]:
    """Lines of text, one per gear."""
    lines = ["  batch  tokens  context  MiB read per step  batch gain"]
    for batch, tokens, context in form.gears:
        read = step_bytes(weight_bytes, row_bytes, batch, context) / (1 << 20)
        gain = batch_gain(weight_bytes, row_bytes, batch, context)
        lines.append(f"  {batch:5}  {tokens:6}  {context:7}  {read:17.1f}  {gain:10.2f}")
    return lines
