"""How many drafts are made: by gain, and never for long where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.engine.speculation.draft_memory import (
    LONGEST_PAUSE,
    MAX_MISSES,
    MAX_MISSES_OF_MODEL,
    SHORTEST_PAUSE,
    DraftMemory,
)
from firstlight.engine.speculation.policy import STEPS_BETWEEN_CHOICES, STEPS_BETWEEN_LOOKS, Policy, StepTimes
from firstlight.engine.speculation.shape import NOTHING, Shape, chain

FLAT = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}
STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def policy_of(times_s: dict[int, float], accepted: int, most: int = 4) -> Policy:
    """After many verifications of four drafts with so many accepted."""
    policy = Policy(most)
    policy.begin(times_s)
    for _ in range(500):
        policy.acceptance.record(4, accepted)
        policy.acceptance.record_coverage(1, 1)
    return policy


def test_before_it_begins_and_where_it_may_not_choose() -> None:
    policy = Policy(3)
    assert policy.choose(1).depth == 0
    fixed = Policy(3, adapts=False)
    assert fixed.choose(1).depth == 0
    fixed.begin(STEEP)
    assert [fixed.choose(number).depth for number in (1, 50)] == [3, 3]
    assert fixed.reason == "--no-draft-adapt"


@pytest.mark.parametrize(("times_s", "accepted", "expected"), [(FLAT, 4, 4), (FLAT, 2, 2), (STEEP, 4, 0)])
def test_as_many_as_pay(times_s: dict[int, float], accepted: int, expected: int) -> None:
    policy = policy_of(times_s, accepted)
    assert policy.choose(1).depth == expected
    assert policy.reason.startswith(f"{expected or 'none'} ")


def test_a_batch_that_fills_the_machine_gets_fewer() -> None:
    times_s = {rows: max(1.0, rows / 8) for rows in (1, 2, 4, 8, 16, 32, 64)}
    policy = policy_of(times_s, 3)
    chosen = [policy.choose(number).depth for number in (1, 2, 4, 8, 16)]
    assert chosen[0] == 3
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 0


def looks_of(policy: Policy, num_steps: int) -> list[int]:
    """The steps with drafts, of so many."""
    return [step for step in range(num_steps) if policy.choose(1).depth]


def test_while_nothing_pays_a_look_is_taken_now_and_then() -> None:
    policy = policy_of(FLAT, 0)
    steps = looks_of(policy, 4 * STEPS_BETWEEN_LOOKS)
    between = np.diff([-1, *steps])
    assert len(steps) == 3
    assert min(between) >= STEPS_BETWEEN_LOOKS
    assert max(between) <= STEPS_BETWEEN_LOOKS + STEPS_BETWEEN_CHOICES
    for _ in range(100):
        policy.acceptance.record(2, 2)
    assert len(looks_of(policy, 2 * STEPS_BETWEEN_CHOICES)) >= STEPS_BETWEEN_CHOICES


def test_a_look_that_costs_much_is_taken_seldom() -> None:
    policy = policy_of(STEEP, 0)
    steps = looks_of(policy, 4 * 200)
    assert len(steps) == 3  # a step of three rows costs two steps more: 1 % after 200
    assert 200 <= min(np.diff([-1, *steps])) <= max(np.diff([-1, *steps])) <= 200 + STEPS_BETWEEN_CHOICES


def test_what_a_look_saw_counts_at_once() -> None:
    policy = policy_of(FLAT, 0)
    while not policy.choose(1).depth:
        pass
    for _ in range(100):
        policy.record(2, 2)
    assert policy.choose(1).depth > 0


def test_a_look_is_no_choice() -> None:
    policy = policy_of(FLAT, 0)
    while not policy.choose(1).depth:
        pass
    assert policy.chosen == NOTHING
    assert policy.reason.startswith("none for 1")


def test_a_choice_of_none_is_for_so_many_sequences() -> None:
    times_s = {rows: max(1.0, rows / 8) for rows in (1, 2, 4, 8, 16, 32, 64)}
    policy = policy_of(times_s, 3)
    assert policy.choose(16).depth == 0
    assert policy.choose(1).depth == 3


def test_a_slow_drafter_is_not_asked() -> None:
    policy = policy_of(FLAT, 4)
    for num in range(1, 5):
        policy.record_draft_time(chain(num), 1, 5.0)
    assert policy.choose(1).depth == 0


def test_step_times_are_lines_between_what_is_known_and_follow_what_comes() -> None:
    times = StepTimes({1: 1.0, 4: 2.5, 8: 3.5})
    assert [times.of(rows) for rows in (1, 2, 4, 6, 16)] == pytest.approx([1.0, 1.5, 2.5, 3.0, 5.5])
    for _ in range(200):
        times.record(4, 3.0)
    assert times.of(4) == pytest.approx(3.0)
    times.record(4, 1000.0)
    assert times.of(4) < 4.0


def test_sizes_that_do_not_come_stay_comparable_with_those_that_do() -> None:
    """A start on a busy machine; then only steps of 32 rows come, in half the time."""
    times = StepTimes({1: 2.0, 16: 20.0, 32: 40.0})
    for _ in range(400):
        times.record(32, 20.0)
    assert times.of(32) == pytest.approx(20.0, rel=0.01)
    assert times.of(64) > 1.9 * times.of(32)
    assert times.of(16) == pytest.approx(10.0, rel=0.2)
    for _ in range(400):
        times.record(16, 12.0)
        times.record(32, 20.0)
    assert times.of(16) == pytest.approx(12.0, rel=0.02)
    assert times.of(32) == pytest.approx(20.0, rel=0.02)


def test_a_step_longer_than_any_at_the_start_is_taken_as_it_is() -> None:
    """A start so slow that it had time for steps of one row alone: then nothing is known of larger ones."""
    times = StepTimes({1: 1.0})
    assert times.of(17) == 1.0
    times.record(17, 8.0)
    assert [times.of(rows) for rows in (1, 17)] == pytest.approx([1.0, 8.0])
    times.record(33, 500.0)
    assert times.of(33) == pytest.approx(33.0)


@pytest.mark.parametrize("most", [MAX_MISSES, MAX_MISSES_OF_MODEL])
def test_a_sequence_whose_drafts_are_wrong_is_left_alone_for_a_while(most: int) -> None:
    memory = DraftMemory()
    for _ in range(most - 1):
        memory.record(0, 100, most)
    assert memory.resume_at == 0
    memory.record(0, 100, most)
    assert memory.resume_at == 100 + SHORTEST_PAUSE
    for _ in range(10):
        memory.record(0, 200, most)
    assert memory.resume_at == 200 + LONGEST_PAUSE
    memory.record(1, 300, most)
    for _ in range(most):
        memory.record(0, 300, most)
    assert memory.resume_at == 300 + SHORTEST_PAUSE


def test_drafts_of_many_sequences_take_their_own_time() -> None:
    """A drafter that is quick for one and slow for eight is asked for one."""
    policy = policy_of(FLAT, 4)
    for num in range(1, 5):
        policy.record_draft_time(chain(num), 1, 0.01)
        policy.record_draft_time(chain(num), 8, 20.0)
    assert policy.choose(1).depth == 4
    assert policy.choose(8).depth == 0
    policy.forced = chain(2)
    assert policy.choose(8).depth == 2


TREE = Shape(3, 4, 16)
# A tree's nodes in the order of their likelihood: 0, 1 and 9 are accepted, of which 0 alone is in the chain.
PATH, LIKELIEST = [0, 2, 9], [0, 1, 4]


def policy_with_trees(times_s: dict[int, float], path: list[int] = PATH) -> Policy:
    policy = Policy(3, tree=TREE)
    policy.begin(times_s)
    for _ in range(500):
        policy.record_tree(16, path, LIKELIEST)
        policy.acceptance.record_coverage(1, 1)
    return policy


def times_of(step: int) -> dict[int, float]:
    """Up to so many rows as quick as one; then each costs as much again."""
    return {rows: max(1.0, rows / step) for rows in (1, 2, 4, 5, 8, 9, 16, 17, 32, 64)}


def test_one_verified_tree_tells_of_smaller_ones_and_of_the_chain() -> None:
    policy = policy_with_trees(times_of(64))
    gains = [policy.expected(TREE._replace(nodes=nodes)) for nodes in (2, 3, 9, 10, 16)]
    assert gains == pytest.approx([1.0, 2.0, 2.0, 3.0, 3.0], abs=0.01)
    assert policy.expected(chain(3)) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("step", "nodes"), [(17, 16), (9, 4), (2, 1), (1, 0)])
def test_a_tree_is_made_as_large_as_pays_and_else_a_chain_or_nothing(step: int, nodes: int) -> None:
    policy = policy_with_trees(times_of(step))
    assert policy.choose(1).nodes == nodes
    assert policy.choose(1).is_tree == (nodes >= 4)
    if nodes < 4:
        assert "in a tree of 3 x 4 would give" in policy.reason
    else:
        assert policy.reason.startswith(f"{nodes} in a tree of 3 x 4 each for 1: ")


def test_a_batch_gets_smaller_trees() -> None:
    policy = policy_with_trees(times_of(17))
    assert [policy.choose(number).nodes for number in (1, 3, 6, 17)] == [16, 4, 1, 0]


def test_while_a_chain_is_better_a_tree_is_looked_at_now_and_then() -> None:
    policy = policy_with_trees(times_of(4), path=[0, 1, 4])
    chosen = [policy.choose(1) for _ in range(1000)]
    assert set(chosen) == {chain(3), TREE}
    num = chosen.count(TREE)
    # Sixteen nodes take 3.25 plain steps more than three: a hundredth of the time is one in 325.
    assert 2 <= num <= 1000 // STEPS_BETWEEN_LOOKS


def test_without_adapting_the_tree_is_always_whole() -> None:
    policy = Policy(3, tree=TREE, adapts=False)
    assert policy.choose(1) == NOTHING
    policy.begin(times_of(1))
    assert [policy.choose(number) for number in (1, 50)] == [TREE, TREE]
