"""Linear layers: from declared tensors to one resident operator each.

Several matrices of the checkpoint that take the same input (q, k, v; gate and up) become one product, when
their formats agree. Column-parallel layers keep a share of the outputs, row-parallel ones a share of the
inputs; the caller sums the latter over the ranks. Invariant: raw blocks are dropped as soon as the layout is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from firstlight.facts.checkpoint.checkpoint import Checkpoint
from firstlight.loading.plan import Wanted
from firstlight.models.declare import Declaration
from firstlight.ops.contract import LinearOp, MatrixKind
from firstlight.ops.matrix import NestedScales
from firstlight.ops.step_clock import Kind
from firstlight.quant.registry import AFFINE_FORMATS, HALVED_FORMATS, NESTED_FORMATS, dequantize
from firstlight.quant.weight import Weight


@dataclass(frozen=True)
class Part:
    """One tensor of a linear layer.

    `interleave`: the head size, and how many of a head's values turn, if pairs are to lie side by side.
    """

    wanted: Wanted
    interleave: tuple[int, int] | None = None


class StoredMatrix:
    """A `contract.Matrix` over raw blocks."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self._weight.shape

    @property
    def format(self) -> str:
        return self._weight.format

    @property
    def order(self) -> torch.Tensor | None:
        return self._weight.order

    def dequantize(self) -> torch.Tensor:
        return dequantize(self._weight)

    def stored(self) -> torch.Tensor:
        halved = HALVED_FORMATS.get(self._weight.format)
        return self._weight.raw if halved is None else halved.half_blocks(self._weight)

    def first_rows(self, num_rows: int) -> StoredMatrix:
        outputs, inputs = self._weight.shape
        raw = self._weight.raw[:num_rows]
        shape = (min(outputs, num_rows), inputs)
        return StoredMatrix(replace(self._weight, shape=shape, raw=raw))

    def affine(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        blocks = AFFINE_FORMATS.get(self._weight.format)
        if blocks is None:
            return None
        affine = blocks.affine(self._weight)
        return affine.codes, affine.scale, affine.offset

    def nested(self) -> NestedScales | None:
        found = NESTED_FORMATS.get(self._weight.format)
        if found is None:
            return None
        parts = found.nested(self._weight)
        return NestedScales(parts.codes, parts.sub_scales, parts.sub_minima, parts.scale, parts.minimum_scale)


class Linear:
    """y = x W^T + b. Parts are stacked along the outputs, in order; biases likewise."""

    def __init__(
        self, declare: Declaration, parts: Sequence[Part], biases: Sequence[Part] = (), role: str = "layer"
    ) -> None:
        self._announce(declare, parts, role)
        self._biases = list(biases)
        for part in parts:
            declare.want(part.wanted, partial(self._take, part))
        for part in biases:
            declare.want(part.wanted, partial(self._take_bias, part))

    @classmethod
    def fed_by_another(cls, declare: Declaration, part: Part, role: str) -> Linear:
        """A layer whose weight is declared elsewhere and arrives through `lay_out` (a tied head)."""
        linear = cls.__new__(cls)
        linear._announce(declare, [part], role)
        linear._biases = []
        return linear

    def _announce(self, declare: Declaration, parts: Sequence[Part], role: str) -> None:
        self._ops, self._clock = declare.ops, declare.group.clock
        self._role = role
        self._parts = list(parts)
        self._weights: dict[str, Weight] = {}
        self._bias_values: dict[str, torch.Tensor] = {}
        self._linears: list[LinearOp] = []
        self._bias_O: torch.Tensor | None = None
        declare.will_lay_out(self._kinds)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._clock.run(Kind.MATRICES, self._multiply, x_TI)

    def _multiply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if len(self._linears) == 1:
            out = self._linears[0](x_TI)
        else:
            out = torch.cat([linear(x_TI) for linear in self._linears], -1)
        return out if self._bias_O is None else out + self._bias_O

    @property
    def operators(self) -> Sequence[LinearOp]:
        """The resident operators, side by side over one input."""
        return self._linears

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias_O

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self._linears)

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor | None:
        """See `LinearOp.rows`; only for a layer of one matrix."""
        assert len(self._linears) == 1, "rows are asked of one matrix"
        return self._linears[0].rows(indices_T)

    def lay_out(self, weights: Sequence[Weight]) -> None:
        """Makes the resident operators of weights in the order of the parts."""
        for run in _same_format(list(weights)):
            self._linears.append(self._ops.linear(StoredMatrix(stack(run)), role=self._role))

    def _kinds(self, checkpoint: Checkpoint) -> list[MatrixKind]:
        kinds: list[MatrixKind] = []
        for part in self._parts:
            facts = checkpoint.tensors.get(part.wanted.name)
            if facts is None:
                return []  # the reader will say which tensor is missing
            outputs, inputs = part.wanted.slice_shape
            last = kinds[-1] if kinds else None
            if last is not None and last.format == facts.format:
                kinds[-1] = MatrixKind(self._role, facts.format, (last.shape[0] + outputs, inputs))
            else:
                kinds.append(MatrixKind(self._role, facts.format, (outputs, inputs)))
        return kinds

    def _take(self, part: Part, weight: Weight) -> None:
        if part.interleave is not None:
            weight = replace(weight, raw=interleave_rows(weight.raw, *part.interleave))
        self._weights[part.wanted.name] = weight
        if len(self._weights) == len(self._parts):
            self.lay_out([self._weights.pop(p.wanted.name) for p in self._parts])

    def _take_bias(self, part: Part, weight: Weight) -> None:
        values = dequantize(weight)
        if part.interleave is not None:
            values = interleave_rows(values.unsqueeze(1), *part.interleave).squeeze(1)
        self._bias_values[part.wanted.name] = values
        if len(self._bias_values) == len(self._biases):
            ordered = [self._bias_values.pop(p.wanted.name) for p in self._biases]
            self._bias_O = torch.cat(ordered).to(self._ops.device)


class Vector:
    """A float32 vector, such as a norm's weight."""

    def __init__(
        self, declare: Declaration, name: str, size: int, interleave: tuple[int, int] | None = None
    ) -> None:
        self.values = torch.empty(0)
        self._interleave = interleave
        self._device = declare.ops.device
        declare.want(Wanted.whole(name, (size,)), self._take)

    def _take(self, weight: Weight) -> None:
        values = dequantize(weight)
        if self._interleave is not None:
            values = interleave_rows(values.unsqueeze(1), *self._interleave).squeeze(1)
        self.values = values.to(self._device)


def interleave_rows(rows: torch.Tensor, head_size: int, num_turned: int | None = None) -> torch.Tensor:
    """Rows of each head from (first halves, second halves) to pairs (2i, 2i+1); exact on raw blocks too.

    `num_turned`: only the first so many rows of each head; None: all.
    """
    num_turned = num_turned or head_size
    heads = rows.view(-1, head_size, rows.shape[-1])
    halves = heads[:, :num_turned].unflatten(1, (2, num_turned // 2))
    return torch.cat((halves.transpose(1, 2).flatten(1, 2), heads[:, num_turned:]), 1).view(rows.shape)


def _same_format(weights: list[Weight]) -> list[list[Weight]]:
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and runs[-1][0].format == weight.format and same_order(runs[-1][0], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return runs


def same_order(one: Weight, other: Weight) -> bool:
    """Whether the columns of both lie in one order, so that one input does for both."""
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def stack(weights: list[Weight]) -> Weight:
    """Weights of one format and input, one above the other."""
    if len(weights) == 1:
        return weights[0]
    assert all(same_order(weights[0], weight) for weight in weights), "columns in one order"
    outputs = sum(weight.shape[0] for weight in weights)
    raw = torch.cat([weight.raw for weight in weights])
    return replace(weights[0], shape=(outputs, weights[0].shape[1]), raw=raw)
