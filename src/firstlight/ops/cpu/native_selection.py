"""The largest logits by our own kernels, where they lie: nothing is copied out but what is asked for.

Invariant: the same values and ids as `TorchSelection`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from firstlight.ops.cpu.library import LARGEST, LOGIT_ROWS, TOP, Op, Pool, Step, address


class NativeSelection:
    """See `selection.Selection`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._step = Step()
        self._program = (Op * 1)(Op(LARGEST))
        self._ids = np.empty(0, np.int64)
        self._values = np.empty(0, np.float32)

    def largest(self, logits_LV: torch.Tensor) -> tuple[list[float], list[int]]:
        num, width = logits_LV.shape
        op = self._program[0]
        if len(self._ids) < num:
            self._ids, self._values = np.empty(num, np.int64), np.empty(num, np.float32)
            op.p[1], op.p[2] = address(self._ids), address(self._values)
        op.n[0], op.p[0] = width, logits_LV.data_ptr()
        self._step.num_rows = num
        self._pool.run(self._program, self._step)
        return self._values[:num].tolist(), self._ids[:num].tolist()

    def first(
        self, logits_LV: torch.Tensor, rows: Sequence[int], divisors: Sequence[float], num: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.empty(len(rows), num), torch.empty(len(rows), num, dtype=torch.int64)
        chosen, by = np.array(rows, np.int64), np.array(divisors, np.float32)
        places = (logits_LV.data_ptr(), address(by), address(ids), address(values))
        op = Op(TOP, LOGIT_ROWS, n=(logits_LV.shape[1], num), p=places)
        self._pool.run([op], Step(num_logits=len(rows), logit_rows=address(chosen)))
        return values, ids
