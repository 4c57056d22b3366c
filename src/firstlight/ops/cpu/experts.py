"""The weights of a layer's experts, and the product of rows with the weights of the experts they go to.

Made by `native_backend.NativeBackend.experts` for layers with a mixture of experts. Rows come sorted by
expert; only experts that have rows are read. Invariant: a row's bits are those of the ordinary product with
its expert.

Shapes: R rows, E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from firstlight.ops.contract import Matrix
from firstlight.ops.cpu.library import EXPERTS, QUANTIZE, Codes, Op, Pool, Step, address
from firstlight.ops.cpu.packed import LAYOUTS, Arena, number_of, pack, packed_bytes


@dataclass
class NativeExperts:
    """See the module. `packed` holds the experts one after the other."""

    pool: Pool
    num_experts: int
    shape: tuple[int, int]  # of one expert: O, I
    number: int  # the library's number of the layout
    packed: torch.Tensor
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.packed.numel()

    @classmethod
    def of(cls, pool: Pool, weights: Sequence[Matrix], arena: Arena) -> NativeExperts:
        """Packs the weights of all experts, which agree in format and shape."""
        first = weights[0]
        outputs, inputs = first.shape
        each = packed_bytes(first.format, first.shape)
        packed = arena.take(each * len(weights))
        for expert, weight in enumerate(weights):
            assert (weight.format, weight.shape) == (first.format, first.shape), "experts are alike"
            pack(weight, packed[expert * each : (expert + 1) * each], pool)
        return cls(pool, len(weights), (outputs, inputs), number_of(first.format), packed)

    def __call__(self, x_RI: torch.Tensor, starts_E1: torch.Tensor) -> torch.Tensor:
        """Float32 [R, O]. Rows `starts[e]` to `starts[e + 1]` belong to expert e; the last start is R."""
        x = x_RI.float().contiguous()
        starts = starts_E1.to(torch.int64).contiguous()
        assert len(starts) == self.num_experts + 1, "each expert's start, and the end"
        out = torch.empty(len(x), self.shape[0])
        ops, codes = [], None
        if LAYOUTS[self.number].dtype is None:
            codes = Codes(len(x), self.shape[1])
            ops.append(Op(QUANTIZE, n=(self.shape[1],), p=(address(x), codes.address)))
        ops.append(self.op(codes, x, out, starts))
        self.pool.run(ops, Step(num_rows=len(x)))
        return out

    def op(self, codes: Codes | None, x: torch.Tensor | None, out: torch.Tensor, starts: torch.Tensor) -> Op:
        """The product as an operator of a program; the starts are read when it runs."""
        places = (address(self.packed), codes and codes.address, address(x), address(out), None)
        sizes = (self.number, *self.shape, out.stride(0), self.num_experts)
        return Op(EXPERTS, n=sizes, p=(*places, address(starts)))
