"""Whole prompts of a model with latent attention: their rows attend to rows of the same step alone.

Called by the runner. Where operators do not promise bits, such a step may make keys and values of its own
latents, which is less work than to look at latents with every head. Invariant: a step in which a sequence has
a history is never such a step.
"""

from __future__ import annotations

import numpy as np

from firstlight.models.batch import OwnRows
from firstlight.ops.contract import AttentionShape, Backend, StepRows

MIN_ROWS = 32  # of the longest prompt: with fewer there is nothing to gain


def own_rows(rows: StepRows, shape: AttentionShape, ops: Backend) -> OwnRows | None:
    """The plan for a step of whole prompts; None where there is none, or where bits are promised."""
    if shape.expanded is None or ops.row_invariant or any(rows.starts) or max(rows.counts) < MIN_ROWS:
        return None
    table_SP = np.zeros((len(rows.counts), max(rows.counts)), dtype=np.int64)  # noqa: N806 - shape suffix
    slots_T = np.arange(1, len(rows.positions_T) + 1)  # noqa: N806
    table_SP[rows.sequence_T, rows.positions_T] = slots_T
    mine = StepRows(
        positions_T=rows.positions_T,
        sequence_T=rows.sequence_T,
        write_slots_T=slots_T,
        page_table_SP=table_SP,
        starts=rows.starts,
        counts=rows.counts,
        page_size=1,
    )
    return OwnRows(ops.plan_attention(mine, shape.expanded))
