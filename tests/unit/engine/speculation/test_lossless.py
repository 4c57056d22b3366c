"""Both ways to accept drafts keep the model's distribution: by enumeration, and by counting draws.

The model here is a table: the logits of the next token, given the one before it, over eight tokens.
Statistical tests have fixed seeds, so that they give the same answer every time.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from firstlight.engine.speculation import rejection_rule
from firstlight.engine.speculation.rejection_rule import RejectionRule, acceptance, probabilities, residual
from firstlight.engine.speculation.rule import Rule
from support.draft_draws import DRAFTER, FIRST, PAIRS, TABLE, V, WithoutResidual, is_fair, step
from support.sampling import kept_tokens, sequence

NUM_DRAWS = 6_000  # a hundred thousand of them are in tests/long


def pair_shares() -> torch.Tensor:
    """The model's probability of each pair of tokens after the first one, float64 [V, V]."""
    first = TABLE[FIRST].double().softmax(-1)
    return first[:, None] * TABLE.double().softmax(-1)


# --- enumeration ---


def test_acceptance_and_residual_give_the_target_for_any_pair_of_distributions() -> None:
    for target, drafter in itertools.product(TABLE.double().softmax(-1), DRAFTER.double().softmax(-1)):
        given = torch.zeros(V, dtype=torch.float64)
        for draft in range(V):
            accepted = acceptance(target, drafter, draft)
            given[draft] += drafter[draft] * accepted
            given += drafter[draft] * (1 - accepted) * residual(target, drafter)
        torch.testing.assert_close(given, target)


def test_two_tokens_after_any_certain_drafts_have_the_target_s_joint_distribution() -> None:
    """A rejected first draft ends the step: the second token is then the model's own."""
    expected = pair_shares()
    for drafts in PAIRS:
        given = torch.zeros(V, V, dtype=torch.float64)
        place = TABLE[FIRST].double().softmax(-1)
        certain = torch.eye(V, dtype=torch.float64)
        accepted = acceptance(place, certain[drafts[0]], drafts[0])
        given += (1 - accepted) * residual(place, certain[drafts[0]])[:, None] * TABLE.double().softmax(-1)
        after = TABLE[drafts[0]].double().softmax(-1)
        second = acceptance(after, certain[drafts[1]], drafts[1])
        given[drafts[0]] += accepted * (second * certain[drafts[1]])
        given[drafts[0]] += accepted * (1 - second) * residual(after, certain[drafts[1]])
        torch.testing.assert_close(given, expected)


def test_with_a_seed_no_pair_of_drafts_changes_a_token() -> None:
    """Keyed: every run is a beginning of what the same seed gives without drafts, and one token at least."""
    seeds = range(40)
    firsts = [run[0] for run in step((), seeds, None)]
    for drafts in PAIRS:
        for first, run in zip(firsts, step(drafts, seeds, None), strict=True):
            assert run[0] == first
            assert len(run) == 1 or run[0] == drafts[0]
            assert len(run) < 3 or run[1] == drafts[1]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8, "temperature": 0.6}],
)
def test_probabilities_are_those_of_what_the_sampler_may_draw(params: dict[str, float]) -> None:
    item = sequence([FIRST], [], **{"temperature": 1.0, **params})
    for row in TABLE:
        given = probabilities(row.clone(), item)
        kept = kept_tokens(row.double().numpy(), item.params)
        assert sorted(kept) == given.nonzero()[:, 0].tolist()
        shares = (row.double() / item.params.temperature)[kept].softmax(-1)
        torch.testing.assert_close(given[kept], shares)


# --- counting ---


@pytest.mark.parametrize("rule", [None, RejectionRule()], ids=["keyed", "rejection"])
def test_drawn_tokens_come_as_often_as_they_should(rule: Rule | None) -> None:
    assert is_fair(rule, NUM_DRAWS)


def test_a_planted_sampler_without_the_residual_is_found() -> None:
    assert not is_fair(WithoutResidual(), NUM_DRAWS)


def test_greedy_requests_are_verified_by_equality_under_either_rule() -> None:
    best = int(TABLE[FIRST].argmax())
    then = int(TABLE[best].argmax())
    for rule in (None, rejection_rule.RejectionRule()):
        assert step((best, (then + 1) % V), range(1), rule, temperature=0.0) == [[best, then]]
