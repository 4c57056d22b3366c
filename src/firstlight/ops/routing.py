"""Which experts a token goes to, and with which weights: the same few torch operators on every device.

Called by `expert_layer`; `native/experts.h` is the same. Invariant: a row of the result depends on that row
of the scores alone.

Shapes: T tokens, E experts, K chosen ones, G groups of experts.
"""

from __future__ import annotations

import torch

from firstlight.facts.description import Experts
from firstlight.ops.sigmoid import sigmoid

_SMALLEST_SUM = 1e-20  # where all chosen experts have no weight at all


def choose_experts(
    scores_TE: torch.Tensor,  # noqa: N803 - shape suffix
    bias_E: torch.Tensor | None,  # noqa: N803
    rule: Experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, K] and their weights float32 [T, K], from the router's float32 scores."""
    weights_TE = sigmoid(scores_TE) if rule.scoring == "sigmoid" else scores_TE.softmax(-1)  # noqa: N806
    wish_TE = weights_TE if bias_E is None else weights_TE + bias_E  # noqa: N806
    if rule.num_groups > 1:
        wish_TE = _of_best_groups(wish_TE, rule)  # noqa: N806
    chosen_TK = wish_TE.topk(rule.num_chosen, -1).indices  # noqa: N806
    weights_TK = weights_TE.gather(1, chosen_TK)  # noqa: N806
    if rule.normalises:
        total = _sum(weights_TK) + _SMALLEST_SUM
        weights_TK = weights_TK / total  # noqa: N806
    return chosen_TK, weights_TK * rule.scale


def _of_best_groups(wish_TE: torch.Tensor, rule: Experts) -> torch.Tensor:  # noqa: N803
    """The wishes with all experts of the other groups out of reach."""
    wish_TGE = wish_TE.unflatten(-1, (rule.num_groups, -1))  # noqa: N806
    best = wish_TGE.topk(rule.num_group_scores, -1).values
    judged_TG = _sum(best).squeeze(-1)  # noqa: N806
    chosen = judged_TG.topk(rule.num_chosen_groups, -1).indices
    is_out = torch.ones_like(judged_TG, dtype=torch.bool).scatter_(1, chosen, False)
    return wish_TGE.masked_fill(is_out[..., None], -torch.inf).flatten(1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Over the last dimension [.., 1], always in the same order."""
    total = values[..., :1]
    for place in range(1, values.shape[-1]):
        total = total + values[..., place : place + 1]
    return total
