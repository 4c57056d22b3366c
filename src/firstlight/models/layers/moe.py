"""Feed-forward layers of experts: each token goes to a few of them, and to shared ones if there are any.

Architectures say how their tensors are called (`ExpertNames`); how a token chooses is in
`facts.description.Experts`. Tokens are sorted by expert, and each expert that has some is multiplied with
once. Each rank has a share of every expert's inner width, or a share of the experts. Invariant: what a row
gets depends on that row alone, with operators that are row-invariant, and all ranks send a row to the same
experts: they choose from the same bits.

Shapes: T tokens, H hidden, E experts, K chosen ones, R rows of the products = T * K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.facts.description import ModelDescription
from firstlight.loading.plan import Wanted, split_evenly
from firstlight.models.declare import Declaration
from firstlight.models.layers.grouped import GroupedLinear
from firstlight.models.layers.linear import Linear, Part, Vector
from firstlight.models.layers.mlp import BLOCK_VALUES, GatedMlp
from firstlight.ops.contract import ROUTER, Tape
from firstlight.ops.routing import choose_experts
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
        self._ops, self._group, self._rule = declare.ops, declare.group, experts
        self._name = f"layers.{layer}.experts"
        prefix = f"model.layers.{layer}.{names.block}"
        hidden, inner = description.hidden_size, experts.inner_size
        share = self._share_of_width(declare, inner)
        # The experts that this rank has something of.
        self._first, self._last = 0, experts.num
        if declare.expert_parallel:
            self._first, self._last = split_evenly(experts.num, 1, declare.group.rank, declare.group.size)
        router = Wanted.whole(f"{prefix}.gate.weight", (experts.num, hidden))
        self._router = Linear(declare, [Part(router)], role=ROUTER)
        bias = f"{prefix}.{names.bias}"
        self._bias = Vector(declare, bias, experts.num) if experts.has_bias else None

        def rows(expert: int, name: str) -> Wanted:
            return Wanted.row_slice(f"{prefix}.experts.{expert}.{name}.weight", (inner, hidden), *share)

        def columns(expert: int) -> Wanted:
            full_name = f"{prefix}.experts.{expert}.{names.down}.weight"
            return Wanted.column_slice(full_name, (hidden, inner), *share)

        own = range(self._first, self._last)
        declare.of_others.update(
            f"{prefix}.experts.{expert}.{name}.weight"
            for expert in {*range(experts.num)} - {*own}
            for name in (names.gate, names.up, names.down)
        )
        self._gate_up = GroupedLinear(declare, [[rows(e, names.gate), rows(e, names.up)] for e in own])
        self._down = GroupedLinear(declare, [[columns(e)] for e in own])
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
        out_TH = self._group.clock.run(Kind.EXPERTS, self._routed, x_TH)  # noqa: N806 - shape suffix
        if self._shared is not None:
            out_TH = out_TH + self._shared.share(x_TH)  # noqa: N806
        return self._group.all_reduce(self._name, out_TH)

    def record(self, tape: Tape, x: Any) -> None:
        """Which experts there are to multiply with is known only when the router has spoken."""
        tape.add_called(lambda x_TH, _: self(x_TH), x)

    def _routed(self, x_TH: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffix
        bias_E = None if self._bias is None else self._bias.values  # noqa: N806
        chosen_TK, weights_TK = choose_experts(self._router(x_TH).float(), bias_E, self._rule)  # noqa: N806
        return self._of_experts(x_TH, chosen_TK, weights_TK)

    def _of_experts(
        self,
        x_TH: torch.Tensor,
        chosen_TK: torch.Tensor,  # noqa: N803 - shape suffix
        weights_TK: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """This rank's share of the weighed sum over each token's experts."""
        num_tokens, num_chosen = chosen_TK.shape
        order_R = chosen_TK.flatten().argsort(stable=True)  # noqa: N806
        counts_E = chosen_TK.flatten().bincount(minlength=self._rule.num)  # noqa: N806
        starts = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)).cpu()[self._first : self._last + 1]
        own_R = order_R[starts[0] : starts[-1]]  # noqa: N806 - those of this rank's experts
        out_RH = torch.zeros(len(order_R), x_TH.shape[1], device=x_TH.device)  # noqa: N806
        if len(own_R):
            starts = starts - starts[0]
            x_RH = x_TH.index_select(0, own_R // num_chosen)  # noqa: N806
            inner_RI = self._ops.gated_silu(self._gate_up(x_RH, starts))  # noqa: N806
            out_RH[own_R] = self._down(inner_RI, starts).float()
        out_TKH = out_RH.view(num_tokens, num_chosen, -1)  # noqa: N806
        # One after the other: a sum over a dimension may take another order for another number of tokens.
        out_TH = out_TKH[:, 0] * weights_TK[:, :1]  # noqa: N806
        for place in range(1, num_chosen):
            out_TH = out_TH + out_TKH[:, place] * weights_TK[:, place : place + 1]  # noqa: N806
        return out_TH


Mlp = ExpertMlp | GatedMlp


def sparse_mlp(names: ExpertNames = ExpertNames()) -> Callable[[Declaration, ModelDescription, int], Mlp]:
    """Makes the layer of a number: experts, or an ordinary one where the description says so."""

    def make(declare: Declaration, description: ModelDescription, layer: int) -> Mlp:
        experts = description.experts
        if experts is None or layer in experts.dense_layers:
            return GatedMlp(declare, description, f"model.layers.{layer}.mlp", layer)
        return ExpertMlp(declare, description, layer, names)

    return make
