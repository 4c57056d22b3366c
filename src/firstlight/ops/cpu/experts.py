"""The weights of a layer's experts, and the product of rows with the weights of the experts they go to.

Heads of latent attention are experts that every row goes to. Rows come sorted by expert; only experts that
have rows are read. Invariant: a row's bits are those of the ordinary product with its expert.

Shapes: R rows, G groups (experts), O outputs, I inputs.
"""

from __future__ import annotations

import torch

from firstlight.ops.cpu.library import EXPERTS, HEADS, QUANTIZE, Codes, Op, Pool, Step, address
from firstlight.ops.cpu.packed import PACKED, Arena, number_of, pack, packed_bytes
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

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of each."""
        assert self._kind is not None, "asked for before the weights are there"
        outputs, inputs = self._kind[1]
        return outputs, inputs

    @property
    def takes_codes(self) -> bool:
        """Whether the input is needed as 8-bit codes, and not as floats."""
        assert self._kind is not None, "asked for before the weights are there"
        return PACKED[self._number].dtype is None

    def put(self, group: int, weight: Matrix) -> None:
        assert weight.order is None, "refused where the module's name is known: see `groups_take_order`"
        kind = (weight.format, tuple(weight.shape))
        each = packed_bytes(*kind)
        if self._kind is None:
            self._kind, self._number = kind, number_of(weight.format)
            self.packed = self._arena.take(each * self.num_experts)
        assert kind == self._kind, "experts are alike"
        pack(weight, self.packed[group * each : (group + 1) * each], self._pool)

    def __call__(self, x_RI: torch.Tensor, starts_G1: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.shape
        x = x_RI.float().contiguous()
        starts = starts_G1.to(torch.int64).contiguous()
        assert len(starts) == self.num_experts + 1, "each expert's start, and the end"
        out = torch.empty(len(x), outputs)
        ops: list[Op] = []
        rows: Codes | torch.Tensor = x
        if self.takes_codes:
            rows = Codes(len(x), inputs)
            ops.append(Op(QUANTIZE, n=(inputs,), p=(address(x), rows.address)))
        self._pool.run([*ops, self.op(rows, out, starts)], Step(num_rows=len(x)))
        return out

    def op(self, x: Codes | torch.Tensor, out: torch.Tensor, starts_G1: torch.Tensor) -> Op:
        """The product as an operator of a program; rows as codes where `takes_codes` says so."""
        places = (*self._places(x, out), None, address(starts_G1))
        return Op(EXPERTS, n=(self._number, *self.shape, out.stride(0), self.num_experts), p=places)

    def head_op(self, x: Codes | torch.Tensor, out_TNO: torch.Tensor) -> Op:
        """The same of heads that every row goes to: from rows head by head to [T, N, O], or a part of it."""
        sizes = (self._number, *self.shape, out_TNO.stride(0), self.num_experts, out_TNO.stride(1))
        return Op(HEADS, n=sizes, p=self._places(x, out_TNO))

    def _places(self, x: Codes | torch.Tensor, out: torch.Tensor) -> tuple[int | None, ...]:
        codes, floats = (x.address, None) if isinstance(x, Codes) else (None, address(x))
        return address(self.packed), codes, floats, address(out)
