"""EAGLE-3 in the engine: drafts from captured states, with keys and values in the target's pages.

A chain of drafts, or a tree of them. See `TreeDrafter`; made by `eagle3_load`. Slot p of a page holds the
fused state h_p, and keys and values of (h_{p-1}, x_p): the state of the token before, and the token itself.
So a page's key determines its content, whatever comes after it. Invariant: the slot of a computed token was
written from the target's own states, never from a draft's; drafts have scratch slots.

Shapes: T rows of a step, B sequences, L slots of the longest one, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch

from firstlight.engine.plan import StepPlan
from firstlight.engine.request import Sequence
from firstlight.engine.speculation.drafter import Tree
from firstlight.engine.speculation.eagle3_layer import DraftRows, Layer, begin
from firstlight.engine.speculation.eagle3_tree import TreeGrower
from firstlight.engine.speculation.guess import Guess
from firstlight.engine.speculation.places import Places
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.speculation.waiting import Waiting
from firstlight.ops.contract import StepRows


class Source(Protocol):
    """Where the target's last step is read: `engine.runner.ModelRunner`."""

    @property
    def states(self) -> torch.Tensor: ...

    @property
    def rows(self) -> StepRows: ...


class Eagle3TreeDrafter:
    """See the module. `ids_R`: the target's id of each draft id, int64. `max_rows`: drafts at once."""

    name = "eagle3"
    is_model = True

    def __init__(
        self,
        layer: Layer,
        layers: tuple[int, ...],
        ids_R: np.ndarray,  # noqa: N803
        places: Places,
        source: Source,
        max_rows: int,
    ) -> None:
        self.layers = layers
        # Entering the mode costs as much as a step's rows do, so only what writes enters it.
        self._waiting = Waiting(torch.inference_mode()(layer.write), places.num_slots)
        self._layer, self._places, self._source = layer, places, source
        self._ids_R, self._max_rows = ids_R, max_rows
        self._guess = Guess(torch.from_numpy(ids_R).to(torch.int32))
        self._grower = TreeGrower(layer, ids_R, places, self._guess)

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Writes the slots of a step's rows, at the latest before the next drafts.

        Those of drafts that are rejected will be overwritten.
        """
        self._waiting.add(self._source.states, self._source.rows, plan.tokens)

    def catch_up(self) -> None:
        """Writes what waits to be written."""
        self._waiting.write_all()

    @torch.inference_mode()
    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        """See `Drafter`. A sequence of one token gets none: there is no state before it."""
        drafts: list[list[int]] = [[] for _ in sequences]
        asked = [row for row, sequence in enumerate(sequences) if len(sequence.tokens) > 1]
        if not asked:
            return drafts
        chosen = [sequences[row] for row in asked]
        self.catch_up()
        first = begin(self._layer, self._places, chosen)
        tokens, rows = first.tokens, np.arange(len(chosen))
        is_sampled = any(not sequence.params.greedy for sequence in chosen)
        made = []
        for place in range(num):
            places = first.positions + place
            draft = DraftRows(tokens, places, first.table[rows, places], first.table)
            best_B, logits_BR = self._layer.draft(draft)  # noqa: N806 - shape suffix
            if is_sampled:
                self._guess.improve(best_B, logits_BR, chosen, place)
            tokens = self._ids_R[best_B]
            made.append(tokens)
        for row, mine in zip(asked, np.stack(made, 1).tolist(), strict=True):
            drafts[row] = mine
        return drafts

    @torch.inference_mode()
    def propose_trees(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        """See `TreeDrafter`. As many sequences at once as the layer has rows for."""
        trees: list[Tree] = [([], []) for _ in sequences]
        asked = [row for row, sequence in enumerate(sequences) if len(sequence.tokens) > 1]
        size = self._max_rows // shape.top_k
        self.catch_up()
        for first in range(0, len(asked), size):
            some = asked[first : first + size]
            chosen = [sequences[row] for row in some]
            for row, tree in zip(some, self._grower.grow(chosen, shape), strict=True):
                trees[row] = tree
        return trees

    @torch.inference_mode()
    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """See `TreeDrafter`."""
        self.catch_up()
        self._layer.moved(from_slots, to_slots)
