"""A hundred thousand draws with drafts, under either rule (`make lossless`; some minutes)."""

from __future__ import annotations

import pytest

from firstlight.engine.sampling.rejection_rule import RejectionRule
from firstlight.engine.sampling.rule import Rule
from support.draft_draws import WithoutResidual, is_fair

pytestmark = pytest.mark.timeout(1800)
NUM_DRAWS = 100_000


@pytest.mark.parametrize("rule", [None, RejectionRule()], ids=["keyed", "rejection"])
def test_drawn_tokens_come_as_often_as_they_should(rule: Rule | None) -> None:
    assert is_fair(rule, NUM_DRAWS)


def test_a_planted_sampler_without_the_residual_is_found() -> None:
    assert not is_fair(WithoutResidual(), NUM_DRAWS)
