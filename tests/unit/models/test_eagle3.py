"""The drafter: training's unrolled drafts are what serving computes, in every dialect's variation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from firstlight.facts.description import RopeScaling
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter
from firstlight.models.eagle3_unroll import UnrollRows
from support.drafters import LATENT, random_drafter

VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before the residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "a norm for each state": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "as EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "one key-value head": {"num_kv_heads": 1},
    "two states": {"state_layers": (1, 3)},
    "latent attention": LATENT,
    "latent attention without a rank of queries": {
        **LATENT,
        "latent": replace(LATENT["latent"], query_rank=None),
        "norm_output": True,
    },
    "yarn that scales the rotation": {
        "rope_scaling": RopeScaling(kind="yarn", factor=8.0, original_max_position=16, turn_factor=1.2)
    },
}
NUM = 14
STEPS = 4


@pytest.fixture(params=VARIATIONS)
def drafter(request: pytest.FixtureRequest) -> Eagle3Drafter:
    return random_drafter(**VARIATIONS[request.param])


def inputs(drafter: Eagle3Drafter, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    states = torch.randn(NUM, len(drafter.config.state_layers), drafter.config.target_hidden_size)
    return states, torch.randint(0, drafter.config.vocab_size, (NUM,))


def unroll(
    drafter: Eagle3Drafter, states: torch.Tensor, tokens: torch.Tensor, queries: list[int]
) -> list[torch.Tensor]:
    chosen = torch.tensor(queries)
    one_document = torch.zeros_like(tokens)
    rows = UnrollRows(states, tokens, torch.arange(len(tokens)), chosen, one_document)
    with torch.no_grad():
        return [drafter.logits(output) for output in drafter.unroll(rows, STEPS)]


def step_by_step(
    drafter: Eagle3Drafter, states: torch.Tensor, tokens: torch.Tensor, index: int
) -> list[torch.Tensor]:
    """As serving does it: keys of true states up to the index, then one draft after the other."""
    cache = DraftCache()
    found = []
    with torch.no_grad():
        output = drafter.advance(drafter.fuse(states[: index + 1]), tokens[: index + 1], cache)[-1:]
        for step in range(STEPS):
            found.append(drafter.logits(output)[0])
            following = tokens[index + step + 1 : index + step + 2]
            output = drafter.advance(drafter.feedback(output), following, cache)
    return found


def test_unrolled_drafts_are_those_of_serving(drafter: Eagle3Drafter) -> None:
    states, tokens = inputs(drafter)
    queries = [0, 3, NUM - STEPS - 1]
    unrolled = unroll(drafter, states, tokens, queries)
    for place, index in enumerate(queries):
        for step, logits in enumerate(step_by_step(drafter, states, tokens, index)):
            torch.testing.assert_close(unrolled[step][place], logits, rtol=1e-4, atol=1e-5)


def test_serving_in_pieces_is_serving_at_once(drafter: Eagle3Drafter) -> None:
    states, tokens = inputs(drafter)
    with torch.no_grad():
        fused = drafter.fuse(states)
        whole = drafter.advance(fused, tokens, DraftCache())
        cache = DraftCache()
        pieces = (slice(0, 5), slice(5, 6), slice(6, NUM))
        parts = [drafter.advance(fused[part], tokens[part], cache) for part in pieces]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def test_rejected_drafts_leave_no_trace(drafter: Eagle3Drafter) -> None:
    states, tokens = inputs(drafter)
    with torch.no_grad():
        fused = drafter.fuse(states)
        cache = DraftCache()
        output = drafter.advance(fused[:6], tokens[:6], cache)[-1:]
        drafter.advance(drafter.feedback(output), tokens[9:10], cache)
        cache.truncate(6)
        after = drafter.advance(fused[6:7], tokens[6:7], cache)
        whole = drafter.advance(fused[:7], tokens[:7], DraftCache())
    torch.testing.assert_close(after[0], whole[-1], rtol=1e-4, atol=1e-5)


def test_nothing_later_reaches_a_draft(drafter: Eagle3Drafter) -> None:
    """A causal perturbation: states after the index, and tokens after the draft's own, change nothing."""
    states, tokens = inputs(drafter)
    index = 5
    before = unroll(drafter, states, tokens, [index])
    changed = states.clone()
    changed[index + 1 :] += 1.0
    for step in range(STEPS):
        others = tokens.clone()
        others[index + step + 1 :] = (others[index + step + 1 :] + 1) % drafter.config.vocab_size
        assert unroll(drafter, changed, others, [index])[step].equal(before[step])


def test_the_layer_sees_the_token_and_every_state(drafter: Eagle3Drafter) -> None:
    states, tokens = inputs(drafter)
    (before, *_) = unroll(drafter, states, tokens, [5])
    others = tokens.clone()
    others[5] = (others[5] + 1) % drafter.config.vocab_size
    assert not unroll(drafter, states, others, [5])[0].equal(before)
    for place in range(states.shape[1]):
        changed = states.clone()
        changed[5, place] += 1.0
        assert not unroll(drafter, changed, tokens, [5])[0].equal(before)
