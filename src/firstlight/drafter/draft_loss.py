"""The loss of a draft, head included, with as little traffic of [Q, R] values as it needs.

Logits over the draft vocabulary are most of what training touches: they are made once, and become their own
gradient in place, a few rows at a time while these are in the cache. Invariant: loss and gradients are those
of autograd through the head and the plain formula.

Of target distribution p and draft distribution q, both over the draft vocabulary, a row's loss is one of
- cross-entropy: -sum p log q;
- lk-alpha: -log a, where a = sum min(p, q) is the chance that a sampled draft is accepted;
- lk-lambda: m * cross-entropy + (1 - m) * (1 - a), with m = exp(-3 a) held fixed: far from the target it is
  cross-entropy, near it acceptance itself.

Shapes: Q indices, R draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.base.errors import UsageError

ROWS_AT_ONCE = 32  # times 8192 logits: a megabyte
MIX_STEEPNESS = 3.0
MIN_OVERLAP = 1e-6

CROSS_ENTROPY, LK_ALPHA, LK_LAMBDA = "cross-entropy", "lk-alpha", "lk-lambda"


@dataclass(frozen=True)
class Scored:
    """What one draft gave: the mean `loss` over the rows that learn, and the most likely draft ids [Q]."""

    loss: torch.Tensor
    best_Q: torch.Tensor


@dataclass(frozen=True)
class Aim:
    """Row `place_Q` of `probs_XR` is a query's target distribution, which it learns where `learn_Q`."""

    probs_XR: torch.Tensor
    place_Q: torch.Tensor
    learn_Q: torch.Tensor
    loss: str = CROSS_ENTROPY


def require_loss(name: str) -> None:
    """Raises `UsageError` for a loss that is not there."""
    if name not in _LOSSES:
        raise UsageError(f"There is no loss {name!r}.", f"Give one of {', '.join(_LOSSES)}.")


def score_drafts(normed_QH: torch.Tensor, head_RH: torch.Tensor, aim: Aim) -> Scored:
    """The loss of the head's distributions; in the dtype of `normed_QH`, with sums in float32."""
    loss, best = _DraftLoss.apply(normed_QH, head_RH, aim)
    return Scored(loss, best)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, head: torch.Tensor, aim: Aim
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = (normed.detach() @ head.detach().to(normed.dtype).t()).float()
        best = torch.empty(len(gradient), dtype=torch.int64, device=gradient.device)
        share = aim.learn_Q.float() / aim.learn_Q.sum().clamp(min=1)
        loss = gradient.new_zeros(())
        # All products are behind: autocast would only round the sums, and copy what they take.
        with torch.autocast(gradient.device.type, enabled=False):
            for start in range(0, len(gradient), ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                logits, probs = gradient[rows], aim.probs_XR[aim.place_Q[rows]]
                highest, best[rows] = logits.max(-1)
                losses = _LOSSES[aim.loss](logits, probs, highest, best[rows])
                loss += (losses * share[rows]).sum()
                logits *= share[rows, None]
        ctx.save_for_backward(normed, head, gradient.to(normed.dtype))
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, head, gradient = ctx.saved_tensors
        scale = grads[0].to(normed.dtype)
        to_normed = gradient @ head.to(normed.dtype) * scale if ctx.needs_input_grad[0] else None
        to_head = (gradient.t() @ (normed * scale)).to(head.dtype) if ctx.needs_input_grad[1] else None
        return to_normed, to_head, None


# Each takes the logits of some rows with their highest value and its place, returns the rows' losses, and
# leaves their gradient where the logits were.


def _cross_entropy(
    logits: torch.Tensor, probs: torch.Tensor, highest: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    given = (probs * logits).sum(-1)  # a few rows in the cache: four times as quick as a product of matrices
    softmax = torch.softmax(logits, -1)
    log_sum = highest - softmax.gather(1, best[:, None]).squeeze(1).log()
    torch.sub(softmax, probs, out=logits)
    return log_sum - given


def _lk_alpha(
    logits: torch.Tensor, probs: torch.Tensor, highest: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    overlap, pull = _overlap(torch.softmax(logits, -1), probs)
    overlap = overlap.clamp(min=MIN_OVERLAP)
    torch.div(pull, -overlap[:, None], out=logits)
    return -overlap.log()


def _lk_lambda(
    logits: torch.Tensor, probs: torch.Tensor, highest: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    overlap, pull = _overlap(torch.softmax(logits, -1), probs)
    mix = torch.exp(-MIX_STEEPNESS * overlap)
    entropy = _cross_entropy(logits, probs, highest, best)
    logits *= mix[:, None]
    logits -= (1 - mix)[:, None] * pull
    return mix * entropy + (1 - mix) * (1 - overlap)


def _overlap(softmax: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum min(p, q), and its gradient by the logits."""
    inside = softmax * (softmax < probs)
    pull = inside - softmax * inside.sum(-1, keepdim=True)
    return torch.minimum(softmax, probs).sum(-1), pull


_Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_LOSSES: dict[str, _Loss] = {CROSS_ENTROPY: _cross_entropy, LK_ALPHA: _lk_alpha, LK_LAMBDA: _lk_lambda}
