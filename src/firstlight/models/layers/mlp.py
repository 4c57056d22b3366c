"""The gated feed-forward layer: down(silu(gate(x)) * up(x)), its inner width shared out over the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.sharding import BLOCK_VALUES as BLOCK_VALUES  # for `moe` too
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.declare import Declaration
from firstlight.models.layers.linear import Linear, Part, Vector
from firstlight.ops.contract import Tape
from firstlight.ops.step_clock import Kind


class GatedMlp:
    """See the module. `mlp_bias` adds a bias to all three products; `inner`: another inner width."""

    def __init__(
        self,
        declare: Declaration,
        description: ModelDescription,
        prefix: str,
        layer: int,
        inner: int | None = None,
    ) -> None:
        self._ops, self._group = declare.ops, declare.group
        self._name = f"layers.{layer}.mlp"
        hidden, inner = description.hidden_size, inner or description.intermediate_size
        unit = BLOCK_VALUES if inner % BLOCK_VALUES == 0 else 1
        share = split_evenly(inner, unit, declare.group.rank, declare.group.size)

        def rows(kind: str, whole: tuple[int, ...]) -> list[Part]:
            names = (f"{prefix}.{name}_proj.{kind}" for name in ("gate", "up"))
            return [Part(Wanted.row_slice(name, whole, *share)) for name in names]

        biases = rows("bias", (inner,)) if description.mlp_bias else ()
        self._gate_up = Linear(declare, rows("weight", (inner, hidden)), biases)
        down = Wanted.column_slice(f"{prefix}.down_proj.weight", (hidden, inner), *share)
        self._down = Linear(declare, [Part(down)])
        self._down_bias = (
            Vector(declare, f"{prefix}.down_proj.bias", hidden) if description.mlp_bias else None
        )

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        out = self._group.all_reduce(self._name, self.share(x_TH))
        return out if self._down_bias is None else out + self._down_bias.values

    def share(self, x_TH: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum, without the last bias."""
        gate_up = self._gate_up(x_TH)
        return self._down(self._group.clock.run(Kind.OTHER, self._ops.gated_silu, gate_up))

    def record_share(self, tape: Tape, share: torch.Tensor, x: Any) -> None:
        """Takes down `share`, which is added to another one."""
        gate_up = tape.product(self._gate_up.operators, x, self._gate_up.bias, "shared gate_up")
        tape.add_to_share(share, self._down.operators, tape.gated_silu(gate_up, "shared inner"))

    def record(self, tape: Tape, x: Any) -> None:
        """Takes down `__call__` with the addition to the residual stream."""
        gate_up = tape.product(self._gate_up.operators, x, self._gate_up.bias, "gate_up")
        bias = self._down_bias.values if self._down_bias is not None else None
        reduce = partial(self._group.all_reduce, self._name) if self._group.size > 1 else None
        tape.add_product(self._down.operators, tape.gated_silu(gate_up), bias, reduce)
