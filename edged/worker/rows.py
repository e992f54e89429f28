"""Ids into the rows of a Batch: what a plan runs, as the graph wants it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edged.worker.executor import Batch, empty_batch
from edged.worker.plan import StepPlan
from edged.worker.slots import Slot


def batch_of(plan: StepPlan, slots: Sequence[Slot], max_context_tokens: int) -> Batch:
    """The inputs of a step. max_context_tokens: the model's own context."""
    batch = empty_batch(plan.lo, plan.batch, plan.tokens)
    for index, count in plan.fresh:
        slot = slots[index]
        ids = slot.tokens[slot.rows : slot.rows + count]
        put_row(batch, index - plan.lo, ids, slot.rows, max_context_tokens)
    return batch


def put_row(batch: Batch, row: int, ids: Sequence[int], past: int, max_context_tokens: int) -> None:
    """Append `ids` to the `past` rows of a slot; shorter than the shape, they are padded."""
    count = len(ids)
    batch.input_ids[row, :count] = ids
    batch.position_ids[row] += past
    if count < batch.shape[1]:
        # Padding stays within the tables, above every valid position.
        np.minimum(batch.position_ids[row], max_context_tokens, out=batch.position_ids[row])
    batch.past_len[row, 0] = past
    batch.logit_idx[row] += count - 1
    batch.fresh[row] = count
