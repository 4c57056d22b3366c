"""The weights of a layer's experts, and the product of rows with the weights of the experts they go to.

Made by `native_backend.NativeBackend.grouped_linear`; heads of latent attention are experts that every row
goes to. Rows come sorted by expert; only experts that have rows are read. Invariant: a row's bits are those
of the ordinary product with its expert.

Shapes: R rows, G groups (experts), O outputs, I inputs.
"""

from __future__ import annotations

import torch

from firstlight.ops.cpu.library import EXPERTS, QUANTIZE, Codes, Op, Pool, Step, address
from firstlight.ops.cpu.packed import LAYOUTS, Arena, number_of, pack, packed_bytes
from firstlight.ops.matrix import Matrix


class NativeExperts:
    """See the module and `contract.GroupedLinearOp`. `packed` holds the experts one after the other."""

    def __init__(self, pool: Pool, num_experts: int, arena: Arena) -> None:
        self.num_experts = num_experts
        self.packed = torch.empty(0, dtype=torch.uint8)
        self._pool, self._arena = pool, arena
        self._kind: tuple[str, tuple[int, ...]] | None = None  # format and shape [O, I] of each
        self._number = 0  # the library's, of the layout

    @property
    def num_bytes(self) -> int:
        return self.packed.numel()

    def put(self, group: int, weight: Matrix) -> None:
        kind = (weight.format, tuple(weight.shape))
        each = packed_bytes(*kind)
        if self._kind is None:
            self._kind, self._number = kind, number_of(weight.format)
            self.packed = self._arena.take(each * self.num_experts)
        assert kind == self._kind, "experts are alike"
        pack(weight, self.packed[group * each : (group + 1) * each], self._pool)

    def __call__(self, x_RI: torch.Tensor, starts_G1: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None, "a product before the weights are there"
        outputs, inputs = self._kind[1]
        x = x_RI.float().contiguous()
        starts = starts_G1.to(torch.int64).contiguous()
        assert len(starts) == self.num_experts + 1, "each expert's start, and the end"
        out = torch.empty(len(x), outputs)
        ops, codes = [], None
        if LAYOUTS[self._number].dtype is None:
            codes = Codes(len(x), inputs)
            ops.append(Op(QUANTIZE, n=(inputs,), p=(address(x), codes.address)))
        places = (address(self.packed), codes and codes.address, address(x), address(out), None)
        sizes = (self._number, outputs, inputs, out.stride(0), self.num_experts)
        ops.append(Op(EXPERTS, n=sizes, p=(*places, address(starts))))
        self._pool.run(ops, Step(num_rows=len(x)))
        return out
