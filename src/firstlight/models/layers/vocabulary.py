"""The two ends of a model that know the vocabulary: the embedding, and the output head.

The embedding is replicated on every rank (looking a row up is cheap), the head is split by tokens of the
vocabulary. When they are tied, the tensor is read once and the embedding hands it to the head.
"""

from __future__ import annotations

from typing import Any

import torch

from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.declare import Declaration
from firstlight.models.layers.linear import Linear, Part
from firstlight.ops.contract import LinearOp, Tape
from firstlight.quant.registry import dequantize
from firstlight.quant.weight import Weight


class Head:
    """Logits of hidden states, float32 [L, V], on every rank."""

    def __init__(self, declare: Declaration, name: str, shape: tuple[int, int], *, tied: bool) -> None:
        self._group = group = declare.group
        shares = [split_evenly(shape[0], 1, rank, group.size) for rank in range(group.size)]
        self._widths = [stop - start for start, stop in shares]
        self._share = shares[group.rank]
        part = Part(Wanted.row_slice(name, shape, *self._share))
        if tied:
            self.linear = Linear.fed_by_another(declare, part, "head")
        else:
            self.linear = Linear(declare, [part], role="head")

    def __call__(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        logits = self.linear(hidden_LH).float()
        return self._gather(logits)

    def record(self, tape: Tape, x: Any) -> None:
        """Takes down `__call__`."""
        tape.logits(self.linear.operators, x, self._gather if self._group.size > 1 else None)

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        return self._group.gather_columns("logits", logits, self._widths)

    def take_tied(self, weight: Weight) -> bool:
        """Lays out this rank's share of the embedding; True if the layout can hand out all its rows."""
        start, stop = self._share
        self.linear.lay_out([Weight(weight.format, (stop - start, weight.shape[1]), weight.raw[start:stop])])
        first = torch.zeros(1, dtype=torch.int64)
        return self._group.size == 1 and self.linear.rows(first) is not None


class Embedding:
    """Rows of the embedding table as float32. Keeps the raw blocks, unless a tied head can hand out rows."""

    def __init__(self, declare: Declaration, name: str, shape: tuple[int, int], tied: Head | None) -> None:
        self._device = declare.ops.device
        self._tied = tied
        self._weight: Weight | None = None
        declare.want(Wanted.whole(name, shape), self._take)

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self._weight is None:
            assert self._tied is not None, "the embedding was not loaded"
            rows = self._tied.linear.rows(tokens_T)
            assert rows is not None, "a packed head cannot serve as the embedding"
            return rows
        raw = self._weight.raw.index_select(0, tokens_T)
        return dequantize(Weight(self._weight.format, (len(tokens_T), self._weight.shape[1]), raw))

    @property
    def operator(self) -> LinearOp | None:
        """The head's operator, where the rows are its own; None where the blocks are kept here."""
        is_head = self._weight is None and self._tied is not None
        return self._tied.linear.operators[0] if is_head and self._tied else None

    def record(self, tape: Tape) -> None:
        """Takes down `__call__`: where the rows are the head's, they are looked up by the tape itself."""
        tape.embed(self.operator, self)

    @property
    def num_bytes(self) -> int:
        """Bytes kept beside the head's layout."""
        return 0 if self._weight is None else self._weight.nbytes

    def _take(self, weight: Weight) -> None:
        if self._tied is None or not self._tied.take_tied(weight):
            self._weight = Weight(weight.format, weight.shape, weight.raw.to(self._device))
