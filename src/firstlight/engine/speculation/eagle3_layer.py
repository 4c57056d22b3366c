"""What the EAGLE-3 drafter asks of its layer, of which there are two: `eagle3_plain` and `eagle3_native`.

Slot p of a page holds the fused state h_p, and keys and values of (h_{p-1}, x_p): see `eagle3`. Invariant: a
layer computes each row by itself, whatever stands beside it.

Shapes: T rows of a step, B sequences, L slots of the longest one, C captured states, H hidden, R draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.deferred_kv_writes import TrueRows
from firstlight.engine.speculation.places import Places


@dataclass(frozen=True)
class DraftRows:
    """One draft for each sequence, int64 [B], and the slots that it attends to [B, L] up to `positions`.

    Several for a sequence where drafts are a tree: to the layer they are as many sequences.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray


class Layer(Protocol):
    """The drafter's layer over its own pool: plain PyTorch, or our own kernels."""

    def write(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:
        """Keeps the fused states of rows, and then their keys and values."""
        ...

    def begin(self, before_B: np.ndarray) -> None:
        """The next drafts follow the states in these slots."""
        ...

    def draft(self, rows: DraftRows) -> tuple[np.ndarray, torch.Tensor]:
        """The place of each row's largest logit, int64 [B], and the logits [B, R]; both until the next call.

        The drafts after it follow this one's output.
        """
        ...

    def follow(self, rows: np.ndarray) -> None:
        """The next drafts follow the outputs of these rows of the last ones."""
        ...

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """Copies states, keys and values of slots, as if all at once."""
        ...


def begin(layer: Layer, places: Places, sequences: Rows[Sequence]) -> DraftRows:
    """Begins a proposal, of chains or of trees, behind the last computed tokens; gives its first rows.

    They are those of the last tokens, which are not yet computed and so have the first scratch slots.
    """
    layer.begin(places.lasts(sequences))
    tokens = np.array([sequence.tokens[-1] for sequence in sequences])
    positions = np.array([len(sequence.tokens) - 2 for sequence in sequences])
    table_BL = places.table(sequences, skipped=1)
    return DraftRows(tokens, positions, table_BL[np.arange(len(sequences)), positions], table_BL)
