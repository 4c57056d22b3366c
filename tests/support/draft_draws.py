"""A model that is a table over eight tokens, steps of it with drafts, and whether draws come as they should.

Used by the tests of drafts that keep the model's distribution. Seeds are fixed, so that an answer stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Rows

import torch

from firstlight.engine.sampling.rejection_rule import RejectionRule
from firstlight.engine.sampling.rule import Rule
from firstlight.engine.sampling.sampler import History, Sampler
from firstlight.engine.sampling.verify import choose
from firstlight.engine.scheduler.sequence import Sequence
from support.sampling import sequence

V = 8
TABLE = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(3))
DRAFTER = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(4))
FIRST = 2  # the last token that is known
PAIRS = list(itertools.product(range(V), repeat=2))
Z_LIMIT = 3.719  # one in ten thousand


def step(
    drafts: tuple[int, ...], seeds: range, rule: Rule | None, parents: Rows[int] = (), **params: object
) -> list[list[int]]:
    """The runs of a step of as many sequences, each with the same drafts and a seed of its own."""
    sequences: list[Sequence] = []
    for seed in seeds:
        made = sequence([FIRST], [], **{"temperature": 1.0, "seed": seed, **params})
        made.drafts, made.parents = list(drafts), list(parents)
        sequences.append(made)
    rows = TABLE[[FIRST, *drafts]].repeat(len(seeds), 1)
    return choose(Sampler(), rows, sequences, rule).runs


def chi_square(counts: torch.Tensor, shares: torch.Tensor) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def limit(freedom: int) -> float:
    """Wilson and Hilferty's approximation."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + Z_LIMIT * math.sqrt(part)) ** 3


def first_tokens(rule: Rule | None, num_draws: int) -> torch.Tensor:
    """How often each token came first, where the drafts were the two likeliest.

    Drafts of every token alike would hide a missing residual: its faults cancel out.
    """
    counts = torch.zeros(V, dtype=torch.float64)
    block = num_draws // 2
    for number, draft in enumerate(TABLE[FIRST].topk(2).indices.tolist()):
        for run in step((draft,), range(number * block, (number + 1) * block), rule):
            counts[run[0]] += 1
    return counts


class WithoutResidual(RejectionRule):
    """The classic fault: what replaces a rejected draft is drawn from the whole distribution."""

    def token(
        self,
        history: History,
        place: int,
        drafts: Rows[int],
        token: int,
        logits_V: torch.Tensor,
    ) -> int:
        given = super().token(history, place, drafts, token, logits_V)
        return given if given in drafts else token


def is_fair(rule: Rule | None, num_draws: int) -> bool:
    """Whether one in ten thousand fair samplers would do worse than this one."""
    counts = first_tokens(rule, num_draws)
    return chi_square(counts, TABLE[FIRST].double().softmax(-1)) < limit(V - 1)
