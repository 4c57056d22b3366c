"""Rows of steps whose draft keys are not yet written: most of the price of a drafter that does not draft.

Used by `eagle3`. While no drafts are made, nobody reads draft keys, and many rows at once cost less than one
by one: the drafter's weights are read once for all. Invariant: what the slots hold after `write_all` is what
they would hold if every step's rows had been written at once, in their order.

Shapes: T rows of a step, C captured states, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

MAX_WAITING = 32  # rows: enough that weights are read once for many, and few enough that no step is long


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
        self._is_used = np.zeros(num_slots, np.bool_)  # by a row that waits
        self._states: torch.Tensor | None = None
        self._rows = np.zeros((4, MAX_WAITING), np.int64)
        self._num = 0

    def add(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:  # noqa: N803 - shape suffix
        """The rows of one step; the states [T, C, H] are copied."""
        num = len(rows.tokens)
        # A slot that changes hands: what was read from it or written to it before, comes before.
        if self._num + num > MAX_WAITING or self._is_used[rows.slots].any():
            self.write_all()
        if num > MAX_WAITING:
            self._write(states_TCH, rows)
            return
        if self._states is None:
            self._states = torch.empty(MAX_WAITING, *states_TCH.shape[1:], device=states_TCH.device)
        part = slice(self._num, self._num + num)
        self._states[part] = states_TCH
        for place, values in enumerate((rows.tokens, rows.positions, rows.slots, rows.before)):
            self._rows[place, part] = values
        self._is_used[rows.slots] = self._is_used[rows.before] = True
        self._num += num

    def write_all(self) -> None:
        """Now the slots of all rows hold what they should."""
        if not self._num or self._states is None:
            return
        tokens, positions, slots, before = self._rows[:, : self._num]
        self._write(self._states[: self._num], TrueRows(tokens, positions, slots, before))
        self._is_used[slots] = self._is_used[before] = False
        self._num = 0
