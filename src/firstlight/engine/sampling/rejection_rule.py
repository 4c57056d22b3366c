"""Classic rejection sampling: a draft is accepted with the model's probability, or replaced by what is left.

An option beside the keyed rule (`--draft-verification rejection`). It keeps the distribution of the answers,
but not the tokens that a seed gives without drafts. Drafts are taken as certain guesses of the drafter,
however it made them. Several for one place are tried in turn, each on what the ones before it left.
Invariant: `acceptance` and `residual` together give the target distribution, exactly.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from firstlight.engine.sampling.noise import gumbel, stream_key
from firstlight.engine.sampling.sampler import MIN_TEMPERATURE, History, adjust
from firstlight.engine.scheduler.sequence import NO_TOKEN

# Two streams beside the sampler's: whether a draft is accepted, and what replaces it.
_ACCEPT_STREAM, _REPLACE_STREAM = 0x0ACC_E975, 0x2E91_ACE5


def acceptance(target_V: torch.Tensor, drafter_V: torch.Tensor, draft: int) -> float:
    """The chance that a draft drawn from `drafter_V` is accepted: probabilities of both."""
    return min(1.0, float(target_V[draft]) / float(drafter_V[draft]))


def residual(target_V: torch.Tensor, drafter_V: torch.Tensor) -> torch.Tensor:
    """The probabilities of what replaces a draft that was not accepted."""
    left_V = (target_V - drafter_V).clamp_(min=0.0)
    total = left_V.sum()
    return left_V / total if float(total) > 0.0 else target_V


def probabilities(logits_V: torch.Tensor, history: History) -> torch.Tensor:
    """What the sampler draws from, float64 [V]: adjusted, scaled, truncated. Changes the logits in place."""
    adjust(logits_V, history)
    params = history.params
    scaled_V = logits_V.double() / max(params.temperature, MIN_TEMPERATURE)
    order_V = scaled_V.argsort(descending=True, stable=True)
    shares_V = scaled_V[order_V].softmax(-1)
    if params.top_k:
        shares_V[params.top_k :] = 0.0
        shares_V /= shares_V.sum()
    before_V = shares_V.cumsum(-1) - shares_V
    kept_V = (before_V < params.top_p) & (shares_V >= params.min_p * shares_V[0])
    kept_V[0] = True
    shares_V = shares_V * kept_V
    return torch.zeros_like(shares_V).scatter_(0, order_V, shares_V / shares_V.sum())


class RejectionRule:
    """See the module, and `Rule`."""

    def token(
        self,
        history: History,
        place: int,
        drafts: Rows[int],
        token: int,
        logits_V: torch.Tensor,
    ) -> int:
        """A draft, or what replaces them. What is greedy, or behind the last draft, is the sampler's."""
        if token == NO_TOKEN or not drafts or history.params.greedy:
            return token
        seed, position = history.params.seed or 0, history.num_tokens
        left_V = probabilities(logits_V, history)
        low, _ = stream_key(seed ^ _ACCEPT_STREAM, position)
        chance = low / 2**32
        for draft in drafts:
            certain_V = torch.zeros_like(left_V)
            certain_V[draft] = 1.0
            accepted = acceptance(left_V, certain_V, draft)
            if chance < accepted:
                return draft
            # Of what is left, `chance` tells nothing but where in it the draw lies.
            chance = (chance - accepted) / (1.0 - accepted)
            left_V = residual(left_V, certain_V)
        ids_V = torch.arange(len(left_V), dtype=torch.int32)
        noise_V = gumbel([stream_key(seed ^ _REPLACE_STREAM, position)], ids_V)[0]
        return int((left_V.log() + noise_V).argmax())
