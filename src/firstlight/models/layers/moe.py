"""Feed-forward layers of experts: each token goes to a few of them, and to shared ones if there are any.

Architectures say how their tensors are called (`ExpertNames`); how a token chooses is in
`facts.description.Experts`. Tokens are sorted by expert, and each expert that has some is multiplied with
once (`ops.expert_layer`). Each rank has a share of every expert's inner width, or a share of the experts.
Invariant: what a row gets depends on that row alone, with operators that are row-invariant, and all ranks
send a row to the same experts: they choose from the same bits.

Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from firstlight.facts.description import ModelDescription
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.declare import Declaration
from firstlight.models.layers.grouped import GroupedLinear
from firstlight.models.layers.linear import Linear, Part, Vector
from firstlight.models.layers.mlp import BLOCK_VALUES, GatedMlp
from firstlight.ops.contract import ROUTER, Tape
from firstlight.ops.step_clock import Kind


@dataclass(frozen=True)
class ExpertNames:
    """Names of tensors within a layer, behind the layer's prefix."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


# Mixtral's, which others have taken over.
MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")


class ExpertMlp:
    """See the module."""

    def __init__(
        self, declare: Declaration, description: ModelDescription, layer: int, names: ExpertNames
    ) -> None:
        experts = description.experts
        assert experts is not None, "a layer of experts in a dense model"
        self._group = declare.group
        self._name = f"layers.{layer}.experts"
        prefix = f"model.layers.{layer}.{names.block}"
        hidden, inner = description.hidden_size, experts.inner_size
        share = self._share_of_width(declare, inner)
        # The experts that this rank has something of.
        first, last = 0, experts.num
        if declare.expert_parallel:
            first, last = split_evenly(experts.num, 1, declare.group.rank, declare.group.size)
        router = Wanted.whole(f"{prefix}.gate.weight", (experts.num, hidden))
        self._router = Linear(declare, [Part(router)], role=ROUTER)
        bias = f"{prefix}.{names.bias}"
        self._bias = Vector(declare, bias, experts.num) if experts.has_bias else None

        def rows(expert: int, name: str) -> Wanted:
            return Wanted.row_slice(f"{prefix}.experts.{expert}.{name}.weight", (inner, hidden), *share)

        def columns(expert: int) -> Wanted:
            full_name = f"{prefix}.experts.{expert}.{names.down}.weight"
            return Wanted.column_slice(full_name, (hidden, inner), *share)

        own = range(first, last)
        declare.of_others.update(
            f"{prefix}.experts.{expert}.{name}.weight"
            for expert in {*range(experts.num)} - {*own}
            for name in (names.gate, names.up, names.down)
        )
        both = [[rows(e, names.gate), rows(e, names.up)] for e in own]
        gate_up = GroupedLinear(declare, both).operator
        down = GroupedLinear(declare, [[columns(e)] for e in own]).operator
        self._experts = declare.ops.expert_layer(experts, own, gate_up, down)
        self._shared: GatedMlp | None = None
        if experts.shared_size:
            shared = f"{prefix}.{names.shared}"
            self._shared = GatedMlp(declare, description, shared, layer, experts.shared_size)

    @staticmethod
    def _share_of_width(declare: Declaration, inner: int) -> tuple[int, int]:
        if declare.expert_parallel:
            return 0, inner
        unit = BLOCK_VALUES if inner % BLOCK_VALUES == 0 else 1
        return split_evenly(inner, unit, declare.group.rank, declare.group.size)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        out_TH = self._group.clock.run(Kind.EXPERTS, self._routed, x_TH)
        if self._shared is not None:
            out_TH = out_TH + self._shared.share(x_TH)
        return self._group.all_reduce(self._name, out_TH)

    @property
    def _bias_E(self) -> torch.Tensor | None:
        return None if self._bias is None else self._bias.values

    def record(self, tape: Tape, x: Any) -> None:
        """Takes down `__call__` with the addition to the residual stream."""
        scores = tape.product(self._router.operators, x, None, "scores")
        share = tape.experts(self._experts, scores, self._bias_E, x)
        if self._shared is not None:
            self._shared.record_share(tape, share, x)
        reduce = partial(self._group.all_reduce, self._name) if self._group.size > 1 else None
        tape.add_share(share, reduce)

    def _routed(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._experts(x_TH, self._router(x_TH).float(), self._bias_E)


Mlp = ExpertMlp | GatedMlp


def sparse_mlp(names: ExpertNames = ExpertNames()) -> Callable[[Declaration, ModelDescription, int], Mlp]:
    """Makes the layer of a number: experts, or an ordinary one where the description says so."""

    def make(declare: Declaration, description: ModelDescription, layer: int) -> Mlp:
        experts = description.experts
        if experts is None or layer in experts.dense_layers:
            return GatedMlp(declare, description, f"model.layers.{layer}.mlp", layer)
        return ExpertMlp(declare, description, layer, names)

    return make
