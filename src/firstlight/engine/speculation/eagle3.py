"""EAGLE-3 in the engine: drafts from captured states, with keys and values in the target's pages.

A chain of drafts, or a tree of them. See `TreeDrafter`. Slot p of a page holds the fused state h_p, and keys
and values of (h_{p-1}, x_p): the state of the token before, and the token itself. So a page's key determines
its content, whatever comes after it. Invariant: the slot of a computed token was written from the target's
own states, never from a draft's; drafts have scratch slots.

Shapes: T rows of a step, B sequences, L slots of the longest one, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.deferred_kv_writes import Waiting
from firstlight.engine.speculation.drafter import Tree
from firstlight.engine.speculation.eagle3_layer import DraftRows, Layer, begin
from firstlight.engine.speculation.guess import Guess
from firstlight.engine.speculation.places import Places
from firstlight.engine.speculation.shape import Shape
from firstlight.ops.contract import StepRows


class Source(Protocol):
    """Where the target's last step is read: `engine.worker.model_runner.ModelRunner`."""

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
        ids_R: np.ndarray,
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
            best_B, logits_BR = self._layer.draft(draft)
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


@dataclass(frozen=True)
class _Level:
    """Nodes in one place behind the last token [B, nodes]: draft ids, log-probabilities of the way to them,
    and their parents by number in their sequence."""

    ids: np.ndarray
    scores: np.ndarray
    parents: np.ndarray


class TreeGrower:
    """Trees of drafts as EAGLE-2 grows them: level by level, the likeliest nodes go on. `ids_R` as above.

    How likely a node is, is the product of the drafter's probabilities on the way to it. Each node that goes
    on has a scratch slot, and a row of the table of slots that names those of its ancestors; so the layer
    runs a level as it runs one draft of as many sequences. The likeliest nodes come first, a node after its
    parent.
    """

    def __init__(self, layer: Layer, ids_R: np.ndarray, places: Places, guess: Guess) -> None:
        self._layer, self._ids_R, self._places, self._guess = layer, ids_R, places, guess

    def grow(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        """A tree for each."""
        num, top_k = len(sequences), shape.top_k
        scratch_BS = np.stack([self._places.scratch(row) for row in range(num)])
        rows = begin(self._layer, self._places, sequences)
        scores, ids = self._likeliest(rows, sequences, 0, top_k)
        levels = [_Level(ids, scores, np.full((num, top_k), -1))]
        parents, numbers = np.repeat(np.arange(num), top_k), np.tile(np.arange(top_k), (num, 1))
        owners = [sequence for sequence in sequences for _ in range(top_k)]
        first = 0
        for depth in range(1, shape.depth):
            going_on = np.take_along_axis(levels[-1].scores, numbers - first, 1)
            tokens = self._ids_R[np.take_along_axis(levels[-1].ids, numbers - first, 1)]
            slots = scratch_BS[:, 1 + (depth - 1) * top_k : 1 + depth * top_k]
            rows = _behind(rows, parents, tokens.ravel(), slots.ravel())
            self._layer.follow(parents)
            more, ids = self._likeliest(rows, owners, depth, top_k)
            scores = going_on[:, :, None] + more.reshape(num, top_k, top_k)
            first += levels[-1].ids.shape[1]
            level_parents = np.repeat(numbers, top_k, 1)
            levels.append(_Level(ids.reshape(num, -1), scores.reshape(num, -1), level_parents))
            best = _order(levels[-1].scores)[:, :top_k]
            parents = (np.arange(num)[:, None] * top_k + best // top_k).ravel()
            numbers = first + best
        return self._trees(levels, shape.nodes)

    def _likeliest(
        self, rows: DraftRows, owners: Rows[Sequence], place: int, num: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of each row's best, and which they are [rows, num]."""
        _, logits_R = self._layer.draft(rows)
        self._guess.draw(logits_R, owners, place)
        best = logits_R.log_softmax(-1).topk(num, -1)
        return np.minimum(best.values.double().cpu().numpy(), 0.0), best.indices.cpu().numpy()

    def _trees(self, levels: list[_Level], num_nodes: int) -> list[Tree]:
        """The likeliest nodes of each sequence."""
        ids, scores, parents = (
            np.concatenate([getattr(level, name) for level in levels], 1)
            for name in ("ids", "scores", "parents")
        )
        chosen = _order(scores)[:, :num_nodes]
        tokens = self._ids_R[np.take_along_axis(ids, chosen, 1)]
        trees = []
        for row, kept in enumerate(chosen.tolist()):
            where = {number: place for place, number in enumerate(kept)} | {-1: -1}
            trees.append((tokens[row].tolist(), [where[parents[row, number]] for number in kept]))
        return trees


def _behind(rows: DraftRows, parents: np.ndarray, tokens: np.ndarray, slots: np.ndarray) -> DraftRows:
    """The next level: each row behind the one of this level that it names."""
    positions, table = rows.positions[parents] + 1, rows.table[parents]
    table[np.arange(len(parents)), positions] = slots
    return DraftRows(tokens, positions, slots, table)


def _order(scores: np.ndarray) -> np.ndarray:
    """From the best to the worst; of equals the first one first, so that no node comes before its parent."""
    order: np.ndarray = np.argsort(-scores, 1, kind="stable")
    return order
