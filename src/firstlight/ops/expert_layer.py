"""A layer's experts, operator by operator: tokens sorted by expert, one product for each that has some.

What backends without operators of their own inherit from `ByOperators`, and the meaning of correct.
Invariant: what a row gets depends on that row alone, with operators that are row-invariant.

Shapes: T tokens, H hidden, E experts, K chosen ones, R rows of the products = T * K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from firstlight.facts.description import Experts
from firstlight.ops.contract import GROUPED, AttentionShape, LinearOp, MatrixKind
from firstlight.ops.grouped import GroupByGroup
from firstlight.ops.groups import ExpertLayerOp, GroupedLinearOp
from firstlight.ops.matrix import Matrix
from firstlight.ops.sigmoid import sigmoid
from firstlight.ops.sparse_attention import BYTES_PER_SCORE, MAX_KEPT_SCORES

_SMALLEST_SUM = 1e-20  # where all chosen experts have no weight at all


class SortedExperts:
    """See `groups.ExpertLayerOp`. `own`: this rank's experts; those of others give nothing here."""

    def __init__(
        self,
        rule: Experts,
        own: range,
        gate_up: GroupedLinearOp,
        down: GroupedLinearOp,
        gated_silu: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._rule, self._own, self._gated_silu = rule, own, gated_silu
        self._gate_up, self._down = gate_up, down

    def __call__(
        self,
        x_TH: torch.Tensor,
        scores_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
    ) -> torch.Tensor:
        chosen_TK, weights_TK = choose_experts(scores_TE, bias_E, self._rule)
        num_tokens, num_chosen = chosen_TK.shape
        order_R = chosen_TK.flatten().argsort(stable=True)
        counts_E = chosen_TK.flatten().bincount(minlength=self._rule.num)
        starts = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)).cpu()
        starts = starts[self._own.start : self._own.stop + 1]
        own_R = order_R[starts[0] : starts[-1]]
        out_RH = torch.zeros(len(order_R), x_TH.shape[1], device=x_TH.device)
        if len(own_R):
            starts = starts - starts[0]
            x_RH = x_TH.index_select(0, own_R // num_chosen)
            inner_RI = self._gated_silu(self._gate_up(x_RH, starts))
            out_RH[own_R] = self._down(inner_RI, starts).float()
        out_TKH = out_RH.view(num_tokens, num_chosen, -1)
        # One after the other: a sum over a dimension may take another order for another number of tokens.
        out_TH = out_TKH[:, 0] * weights_TK[:, :1]
        for place in range(1, num_chosen):
            out_TH = out_TH + out_TKH[:, place] * weights_TK[:, place : place + 1]
        return out_TH


class _Operators(Protocol):
    """What a backend brings along."""

    def linear(self, weight: Matrix, *, role: str) -> LinearOp: ...

    def gated_silu(self, gate_up_TI: torch.Tensor, /) -> torch.Tensor: ...


class ByOperators:
    """Part of a backend: its products of groups and its experts, made of its own single products, and what
    stock operators take of memory."""

    hands_out_rows = False
    groups_take_order = True

    def loading_bytes(self, kind: MatrixKind) -> int:
        """See `contract.Backend`: the matrix in float32, and another time where it is packed from that."""
        return 2 * kind.shape[0] * kind.shape[1] * 4

    def attention_bytes(self, shape: AttentionShape, num_tokens: int, max_position: int) -> int:
        """See `contract.Backend`: scores; a history is padded to at most twice its length."""
        return min(MAX_KEPT_SCORES, num_tokens * shape.num_heads * 2 * max_position) * BYTES_PER_SCORE

    def grouped_linear(self: _Operators, num_groups: int) -> GroupedLinearOp:
        """See `contract.Backend`."""
        return GroupByGroup(num_groups, partial(self.linear, role=GROUPED))

    def expert_layer(
        self: _Operators, rule: Experts, own: range, gate_up: GroupedLinearOp, down: GroupedLinearOp
    ) -> ExpertLayerOp:
        """See `contract.Backend`."""
        return SortedExperts(rule, own, gate_up, down, self.gated_silu)


# Which experts a token goes to, and with which weights: the same few torch operators on every device. A row
# of the result depends on that row of the scores alone. Shapes: T tokens, E experts, K chosen ones, G
# groups of experts.


def choose_experts(
    scores_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    rule: Experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, K] and their weights float32 [T, K], from the router's float32 scores."""
    weights_TE = sigmoid(scores_TE) if rule.scoring == "sigmoid" else scores_TE.softmax(-1)
    wish_TE = weights_TE if bias_E is None else weights_TE + bias_E
    if rule.num_groups > 1:
        wish_TE = _of_best_groups(wish_TE, rule)
    chosen_TK = wish_TE.topk(rule.num_chosen, -1).indices
    weights_TK = weights_TE.gather(1, chosen_TK)
    if rule.normalises:
        total = _sum(weights_TK) + _SMALLEST_SUM
        weights_TK = weights_TK / total
    return chosen_TK, weights_TK * rule.scale


def _of_best_groups(wish_TE: torch.Tensor, rule: Experts) -> torch.Tensor:
    """The wishes with all experts of the other groups out of reach."""
    wish_TGE = wish_TE.unflatten(-1, (rule.num_groups, -1))
    best = wish_TGE.topk(rule.num_group_scores, -1).values
    judged_TG = _sum(best).squeeze(-1)
    chosen = judged_TG.topk(rule.num_chosen_groups, -1).indices
    is_out = torch.ones_like(judged_TG, dtype=torch.bool).scatter_(1, chosen, False)
    return wish_TGE.masked_fill(is_out[..., None], -torch.inf).flatten(1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Over the last dimension [.., 1], always in the same order."""
    total = values[..., :1]
    for place in range(1, values.shape[-1]):
        total = total + values[..., place : place + 1]
    return total
