"""Both ways to accept drafts keep the model's distribution: by enumeration, and by counting draws.

The model here is a table: the logits of the next token, given the one before it, over eight tokens.
Statistical tests have fixed seeds, so that they give the same answer every time.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec import structs

from firstlight.engine.sampling import rejection_rule
from firstlight.engine.sampling.rejection_rule import RejectionRule, acceptance, probabilities, residual
from firstlight.engine.sampling.rule import Rule
from firstlight.engine.speculation.tree import ROOT
from support.draft_draws import (
    DRAFTER,
    FIRST,
    PAIRS,
    TABLE,
    V,
    WithoutResidual,
    chi_square,
    is_fair,
    limit,
    step,
)
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


def test_one_of_several_guesses_after_the_other_leaves_the_target_distribution() -> None:
    """Any three different guesses for a place, tried in turn on what the ones before them left."""
    for place, guesses in itertools.product(range(V), itertools.permutations(range(V), 3)):
        target = TABLE[place].double().softmax(-1)
        given, left, chance = torch.zeros(V, dtype=torch.float64), target, 1.0
        certain = torch.eye(V, dtype=torch.float64)
        for guess in guesses:
            accepted = acceptance(left, certain[guess], guess)
            given[guess] += chance * accepted
            left, chance = residual(left, certain[guess]), chance * (1 - accepted)
        torch.testing.assert_close(given + chance * left, target)


def test_the_rule_takes_guesses_in_turn_by_one_draw() -> None:
    """One draw decides of all the guesses, and yet each comes as often as it should."""
    history, guesses = sequence([FIRST], [], temperature=1.0), [4, 1, 6]
    target = TABLE[FIRST].double().softmax(-1)
    num, counts = 2000, torch.zeros(V, dtype=torch.float64)
    for seed in range(num):
        history.params = structs.replace(history.params, seed=seed)
        counts[RejectionRule().token(history, 0, guesses, 0, TABLE[FIRST].clone())] += 1
    assert chi_square(counts, target) < limit(V - 1)


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
def test_pairs_of_tokens_from_trees_come_as_often_as_they_should(rule: Rule | None) -> None:
    """The two likeliest behind the first token, and behind each of these: the second token, where there is
    one, is distributed as the model says behind the first."""
    first = TABLE[FIRST].topk(2).indices.tolist()
    seconds = [TABLE[token].topk(2).indices.tolist() for token in first]
    drafts = [*first, *seconds[0], *seconds[1]]
    runs = step(tuple(drafts), range(NUM_DRAWS // 3), rule, parents=[ROOT, ROOT, 0, 0, 1, 1])
    counts = torch.zeros(V, dtype=torch.float64)
    for run in runs:
        counts[run[0]] += 1
    assert chi_square(counts, TABLE[FIRST].double().softmax(-1)) < limit(V - 1)
    for token in first:
        after = torch.zeros(V, dtype=torch.float64)
        for run in runs:
            if run[0] == token:
                after[run[1]] += 1
        assert chi_square(after, TABLE[token].double().softmax(-1)) < limit(V - 1)
    assert max(len(run) for run in runs) == 3


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
