"""A tree of drafts from the EAGLE-3 layer, as EAGLE-2 grows it: level by level, the likeliest nodes go on.

Called by `eagle3`. How likely a node is, is the product of the drafter's probabilities on the way to it. Each
node that goes on has a scratch slot, and a row of the table of slots that names those of its ancestors; so
the layer runs a level as it runs one draft of as many sequences. Invariant: the likeliest nodes come first,
and a node after its parent.

Shapes: B sequences, N nodes that go on, R draft vocabulary, L slots of the longest history.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from firstlight.engine.request import Sequence
from firstlight.engine.speculation.drafter import Tree
from firstlight.engine.speculation.eagle3_layer import DraftRows, Layer, begin
from firstlight.engine.speculation.guess import Guess
from firstlight.engine.speculation.places import Places
from firstlight.engine.speculation.shape import Shape


@dataclass(frozen=True)
class _Level:
    """Nodes in one place behind the last token [B, nodes]: draft ids, log-probabilities of the way to them,
    and their parents by number in their sequence."""

    ids: np.ndarray
    scores: np.ndarray
    parents: np.ndarray


class TreeGrower:
    """See the module. `ids_R` as in the drafter."""

    def __init__(self, layer: Layer, ids_R: np.ndarray, places: Places, guess: Guess) -> None:  # noqa: N803
        self._layer, self._ids_R, self._places, self._guess = layer, ids_R, places, guess

    def grow(self, sequences: Rows[Sequence], shape: Shape) -> list[Tree]:
        """A tree for each."""
        num, top_k = len(sequences), shape.top_k
        scratch_BS = np.stack([self._places.scratch(row) for row in range(num)])  # noqa: N806 - shape suffix
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
        _, logits_R = self._layer.draft(rows)  # noqa: N806
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
