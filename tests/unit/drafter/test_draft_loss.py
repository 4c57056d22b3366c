"""The hand-written loss against autograd through the plain formula."""

from __future__ import annotations

import pytest
import torch

from firstlight.base.errors import UsageError
from firstlight.drafter.draft_loss import (
    CROSS_ENTROPY,
    LK_ALPHA,
    LK_LAMBDA,
    MIX_STEEPNESS,
    Aim,
    require_loss,
    score_drafts,
)

NUM, VOCABULARY, WIDTH = 41, 50, 16  # more rows than are taken at once, and not a multiple


def plain(kind: str, logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    log_q = logits.log_softmax(-1)
    entropy = -(probs * log_q).sum(-1)
    overlap = torch.minimum(log_q.exp(), probs).sum(-1)
    mix = torch.exp(-MIX_STEEPNESS * overlap.detach())
    return {
        CROSS_ENTROPY: entropy,
        LK_ALPHA: -overlap.log(),
        LK_LAMBDA: mix * entropy + (1 - mix) * (1 - overlap),
    }[kind]


def given() -> tuple[torch.Tensor, torch.Tensor, Aim]:
    torch.manual_seed(0)
    normed = torch.randn(NUM, WIDTH, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    probs = (2 * torch.randn(NUM + 3, VOCABULARY)).softmax(-1)
    return normed, head, Aim(probs, torch.randint(0, NUM + 3, (NUM,)), torch.rand(NUM) > 0.3)


@pytest.mark.parametrize("kind", [CROSS_ENTROPY, LK_ALPHA, LK_LAMBDA])
def test_loss_and_gradients_are_those_of_autograd(kind: str) -> None:
    normed, head, aim = given()
    scored = score_drafts(normed, head, Aim(aim.probs_XR, aim.place_Q, aim.learn_Q, kind))
    found = torch.autograd.grad(2.5 * scored.loss, (normed, head))
    logits = normed @ head.t()
    expected = plain(kind, logits, aim.probs_XR[aim.place_Q])[aim.learn_Q].mean()
    torch.testing.assert_close(scored.loss, expected, rtol=1e-5, atol=1e-6)
    assert scored.best_Q.equal(logits.argmax(-1))
    for ours, plainly in zip(found, torch.autograd.grad(2.5 * expected, (normed, head)), strict=True):
        torch.testing.assert_close(ours, plainly, rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_learn_leave_no_gradient() -> None:
    normed, head, aim = given()
    nothing = Aim(aim.probs_XR, aim.place_Q, torch.zeros(NUM, dtype=torch.bool))
    scored = score_drafts(normed, head, nothing)
    assert float(scored.loss.detach()) == 0
    assert not any(grad.any() for grad in torch.autograd.grad(scored.loss, (normed, head)))


def test_in_bfloat16_it_is_nearly_the_same() -> None:
    normed, head, aim = given()
    wide, narrow = score_drafts(normed, head, aim).loss, score_drafts(normed.bfloat16(), head, aim).loss
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=2e-2, atol=0)
    torch.autograd.backward(narrow)
    assert normed.grad is not None
    assert head.grad is not None
    assert head.grad.dtype == torch.float32


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UsageError, match="no loss 'hinge'"):
        require_loss("hinge")
