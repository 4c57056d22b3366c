"""A layer's experts as operators of the native library: chosen, sorted, multiplied with and added up.

Invariant: both are the same operators and give the same bits.

Shapes: T tokens, H hidden, E experts, K chosen ones, R rows of the products = T * K, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.facts.description import Experts
from firstlight.ops.cpu.experts import NativeExperts
from firstlight.ops.cpu.library import (
    CHOOSE,
    COMBINE,
    EACH,
    GATHER,
    GROUP,
    GROUP_BYTES,
    QUANTIZE,
    SILU,
    SORT,
    Codes,
    Op,
    Pool,
    Step,
    address,
)


@dataclass(frozen=True)
class Room:
    """Between the operators of one layer; another layer may use it after them."""

    chosen_R: torch.Tensor
    weights_R: torch.Tensor
    order_R: torch.Tensor
    place_R: torch.Tensor
    gathered: Codes | torch.Tensor
    gate_up_RI: torch.Tensor
    inner: Codes | torch.Tensor
    down_RH: torch.Tensor


@dataclass(frozen=True)
class Recorded:
    """The operators, and where the rows of each expert begin: in memory of this layer alone.

    A thread that comes late to a product still looks at where they begin.
    """

    ops: list[Op]
    starts: torch.Tensor


class NativeExpertLayer:
    """See `groups.ExpertLayerOp`."""

    def __init__(
        self, pool: Pool, rule: Experts, own: range, gate_up: NativeExperts, down: NativeExperts
    ) -> None:
        self._pool, self._rule, self._own = pool, rule, own
        self._gate_up, self._down = gate_up, down

    @property
    def takes_codes(self) -> bool:
        """Whether the input is needed as 8-bit codes, and not as floats."""
        return self._gate_up.takes_codes

    @property
    def num_outputs(self) -> int:
        return self._down.shape[0]

    def room(self, max_rows: int) -> Room:
        """For a step of so many tokens."""
        rows, hidden = max_rows * self._rule.num_chosen, self._gate_up.shape[1]
        width, inner = self._gate_up.shape[0], self._down.shape[1]
        places = [torch.zeros(rows, dtype=torch.int64) for _ in range(3)]
        return Room(
            places[0],
            torch.zeros(rows),
            places[1],
            places[2],
            Codes(rows, hidden) if self._gate_up.takes_codes else torch.empty(rows, hidden),
            torch.empty(rows, width),
            Codes(rows, inner) if self._down.takes_codes else torch.empty(rows, inner),
            torch.empty(rows, self._down.shape[0]),
        )

    def record(
        self,
        x: Codes | torch.Tensor,
        scores_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        out_TH: torch.Tensor,
        room: Room,
    ) -> Recorded:
        """From rows, as codes where `takes_codes` says so, to the weighed sum of what their experts give."""
        rule = self._rule
        num, chosen = rule.num, rule.num_chosen
        starts = torch.zeros(num + 1, dtype=torch.int64)
        groups = (rule.num_groups, rule.num_chosen_groups, rule.num_group_scores)
        sizes = (num, chosen, rule.scoring == "sigmoid", *groups, rule.normalises)
        rows = (room.chosen_R, room.weights_R)
        choose = Op(CHOOSE, n=sizes, p=(address(scores_TE), address(bias_E), *(address(one) for one in rows)))
        choose.f[0] = rule.scale
        sorting = (room.chosen_R, starts, room.order_R, room.place_R)
        sort = Op(SORT, n=(num, chosen), p=tuple(address(one) for one in sorting))
        is_coded = isinstance(room.gathered, Codes)
        hidden = self._gate_up.shape[1]
        row_bytes = hidden // GROUP * GROUP_BYTES if is_coded else 4 * hidden
        places = (_memory(x), _memory(room.gathered), address(room.order_R))
        gather = Op(GATHER, EACH, n=(row_bytes, *[0] * 6, chosen), p=places)
        floats, codes = _floats_and_codes(room.inner)
        gate = Op(
            SILU,
            EACH,
            n=(self._down.shape[1], *[0] * 6, chosen),
            p=(address(room.gate_up_RI), address(floats), codes and codes.address),
        )
        own = self._own
        summed = (room.down_RH, room.place_R, room.weights_R, out_TH, starts)
        combine = Op(
            COMBINE,
            n=(self.num_outputs, chosen, own.start, own.stop),
            p=tuple(address(one) for one in summed),
        )
        up = self._gate_up.op(room.gathered, room.gate_up_RI, starts[own.start :])
        down = self._down.op(room.inner, room.down_RH, starts[own.start :])
        return Recorded([choose, sort, gather, up, gate, down, combine], starts)

    def __call__(
        self,
        x_TH: torch.Tensor,
        scores_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows = len(x_TH)
        x, scores = x_TH.float().contiguous(), scores_TE.contiguous()
        out = torch.empty(num_rows, self.num_outputs)
        rows: Codes | torch.Tensor = x
        ops = []
        if self.takes_codes:
            rows = Codes(num_rows, x.shape[1])
            ops.append(Op(QUANTIZE, n=(x.shape[1],), p=(address(x), rows.address)))
        room = self.room(num_rows)
        recorded = self.record(rows, scores, bias_E, out, room)
        self._pool.run(ops + recorded.ops, Step(num_rows=num_rows))
        return out


def _memory(rows: Codes | torch.Tensor) -> int | None:
    return address(rows.groups if isinstance(rows, Codes) else rows)


def _floats_and_codes(rows: Codes | torch.Tensor) -> tuple[torch.Tensor | None, Codes | None]:
    return (None, rows) if isinstance(rows, Codes) else (rows, None)
