"""The chain loop: made at once or step by step, it is the same loop."""

from __future__ import annotations

import random

import pytest
import torch

from firstlight.drafter.chain import eagle_proposer, ngram_proposer, run_chain, unrolled_proposer
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.ngram import NgramDrafter
from support.drafters import random_drafter


@pytest.mark.parametrize("norm_output", [False, True])
def test_drafts_made_at_once_are_accepted_as_those_made_one_by_one(norm_output: bool) -> None:
    drafter = random_drafter(norm_output=norm_output)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(40, 3, 32, generator=generator)
    # Half of the tokens are what the drafter itself would say next, so that some chains are long.
    tokens = torch.randint(64, (40,), generator=generator).tolist()
    for index in range(1, 39, 2):
        (tokens[index + 1],) = eagle_proposer(drafter, states, tokens)(index, 1)
    slow = run_chain(tokens, 4, 3, eagle_proposer(drafter, states, tokens))
    fast = run_chain(tokens, 4, 3, unrolled_proposer(drafter, 3, states, tokens))
    assert fast == slow
    assert 0 < slow.accepted[0] < slow.num_rounds


def test_the_lookup_beside_a_drafter_is_the_one_that_is_served() -> None:
    chance = random.Random(4)
    tokens = [chance.randrange(4) for _ in range(80)]
    propose = ngram_proposer(tokens)
    for index in range(len(tokens)):
        submit = Submit("r", tokens[: index + 1], SamplingParams())
        served = NgramDrafter().propose([Sequence(submit, 0, frozenset(), 10**6)], 3)
        assert [propose(index, 3)] == served
