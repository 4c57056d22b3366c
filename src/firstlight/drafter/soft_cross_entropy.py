"""The loss of a draft, head included, with as little traffic of [Q, R] values as it needs.

Called by `objective`. Logits over the draft vocabulary are most of what training touches: they are made
once, and become their own gradient in place, a few rows at a time while these are in the cache. Invariant:
loss and gradients are those of autograd through `head`, log-softmax and the sum.

Shapes: Q indices, R draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

ROWS_AT_ONCE = 32  # times 8192 logits: a megabyte


class Scored:
    """What one draft gave: the mean `loss` over the rows that learn, and the most likely draft ids [Q]."""

    def __init__(self, loss: torch.Tensor, best_Q: torch.Tensor) -> None:  # noqa: N803
        self.loss, self.best_Q = loss, best_Q


def score_drafts(
    normed_QH: torch.Tensor,  # noqa: N803
    head_RH: torch.Tensor,  # noqa: N803
    probs_XR: torch.Tensor,  # noqa: N803
    place_Q: torch.Tensor,  # noqa: N803
    learn_Q: torch.Tensor,  # noqa: N803
) -> Scored:
    """Soft cross-entropy of the head's distribution against row `place_Q` of `probs_XR`, where `learn_Q`."""
    loss, best = _SoftCrossEntropy.apply(normed_QH, head_RH, probs_XR, place_Q, learn_Q)
    return Scored(loss, best)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, head, probs, place, learn = given
        gradient = normed.detach() @ head.detach().t()
        best = torch.empty(len(gradient), dtype=torch.int64, device=gradient.device)
        share = learn.to(torch.float32) / learn.sum().clamp(min=1)
        loss = gradient.new_zeros((), dtype=torch.float32)
        for start in range(0, len(gradient), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            loss += _score_rows(gradient[rows], probs[place[rows]], share[rows], best[rows])
        ctx.save_for_backward(normed, head, gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, head, gradient = ctx.saved_tensors
        scale = grads[0].to(normed.dtype)
        to_normed = gradient @ head * scale if ctx.needs_input_grad[0] else None
        to_head = gradient.t() @ (normed * scale) if ctx.needs_input_grad[1] else None
        return to_normed, to_head, None, None, None


def _score_rows(
    logits: torch.Tensor, probs: torch.Tensor, share: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """The rows' part of the loss; leaves their most likely ids in `best` and their gradient in `logits`."""
    highest, chosen = logits.max(-1)
    best.copy_(chosen)
    given = torch.bmm(probs[:, None], logits[:, :, None]).flatten()
    softmax = torch.softmax(logits, -1)
    log_sum = highest - softmax.gather(1, chosen[:, None]).squeeze(1).log()
    torch.sub(softmax, probs, out=logits)
    logits *= share[:, None]
    return ((log_sum - given) * share).sum()
