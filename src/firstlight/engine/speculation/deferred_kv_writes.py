"""Rows of steps whose draft keys are not yet written: most of the price of a drafter that does not draft.

While no drafts are made, nobody reads draft keys, and many rows at once cost less than one by one: the
drafter's weights are read once for all, and where rows lie is worked out once. Invariant: what the slots hold
after `write_all` is what they would hold if every step's rows had been written at once, in their order.

Shapes: T rows of a step, C captured states, H hidden, M rows that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from firstlight.ops.contract import StepRows

MAX_WAITING = 64  # rows: enough that weights are read once for many, and few enough that no step is long
NOBODY = -1


@dataclass(frozen=True)
class TrueRows:
    """Rows of steps of the target, int64 [T] each, all in different slots.

    `positions` count from the second token on; `before` is the slot of the token before, 0 for the first.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    before: np.ndarray


class Waiting:
    """See the module. `write` is the layer's; `num_slots`: of the pages, those for drafts included."""

    def __init__(self, write: Callable[[torch.Tensor, TrueRows], None], num_slots: int) -> None:
        self._write = write
        self._writers = np.full(num_slots, NOBODY)  # of slots: the last of the steps that wait
        self._states: torch.Tensor | None = None
        self._steps: list[StepRows] = []
        self._tokens: list[int] = []

    def add(self, states_TCH: torch.Tensor, rows: StepRows, tokens: list[int]) -> None:
        """The rows of one step, a token each; the states [T, C, H] are copied."""
        num = len(tokens)
        if len(self._tokens) + num > MAX_WAITING:
            self.write_all()
        if num > MAX_WAITING:
            self._write(states_TCH, _joined([rows], tokens))
            return
        if self._states is None:
            self._states = torch.empty(MAX_WAITING, *states_TCH.shape[1:], device=states_TCH.device)
        self._states[len(self._tokens) : len(self._tokens) + num] = states_TCH
        self._steps.append(rows)
        self._tokens += tokens

    def write_all(self) -> None:
        """Now the slots of all rows hold what they should."""
        if self._states is None or not self._steps:
            return
        rows = _joined(self._steps, self._tokens)
        ends = np.cumsum([len(step.positions_T) for step in self._steps])
        # A slot that changed hands: what was read from it or written to it before, comes before.
        apart = len(ends) > 1 and self._meet(rows, np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)))
        first = 0
        for end in ends if apart else ends[-1:]:
            part = slice(first, end)
            arrays = (rows.tokens[part], rows.positions[part], rows.slots[part], rows.before[part])
            self._write(self._states[part], TrueRows(*arrays))
            first = end
        self._steps, self._tokens = [], []

    def _meet(self, rows: TrueRows, steps_M: np.ndarray) -> bool:
        """Whether a step writes what one before it writes or reads. `steps_M`: the step of each row."""
        self._writers[rows.slots] = steps_M  # the last one stays
        is_again = self._writers[rows.slots] != steps_M
        is_read = self._writers[rows.before] > steps_M
        self._writers[rows.slots] = NOBODY
        return bool(is_again.any() or is_read.any())


def _joined(steps: list[StepRows], tokens: list[int]) -> TrueRows:
    """The rows of all these steps, in their order."""
    positions_M = np.concatenate([step.positions_T for step in steps])
    slots_M = np.concatenate([step.write_slots_T for step in steps])
    before_M = slots_M - 1
    is_elsewhere = positions_M % steps[0].page_size == 0
    first = 0
    for step in steps:
        part = slice(first, first + len(step.positions_T))
        chosen = (
            np.arange(part.stop - first) if step.branches_TW is not None else is_elsewhere[part].nonzero()[0]
        )
        if len(chosen):
            before_M[first + chosen] = _before(step, chosen)
        first = part.stop
    return TrueRows(np.array(tokens, np.int64), np.maximum(positions_M - 1, 0), slots_M, before_M)


def _before(rows: StepRows, chosen_M: np.ndarray) -> np.ndarray:
    """The slots of the tokens before these rows; 0 where there is none."""
    positions_M, size = rows.positions_T[chosen_M], rows.page_size
    places_M = rows.places(chosen_M, np.maximum(positions_M - 1, 0)[:, None])[:, 0]
    pages_M = rows.page_table_SP[rows.sequence_T[chosen_M], places_M // size]
    return np.where(positions_M > 0, pages_M * size + places_M % size, 0)
