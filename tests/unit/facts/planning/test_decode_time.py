"""Times of all-reduces and of steps, and the acceptance from which drafts pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from firstlight.base.errors import UsageError
from firstlight.facts.checkpoint.weight_schemes import DeclaredWeights
from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.all_reduce import ALGORITHMS, LINKS, measured, modelled
from firstlight.facts.planning.declared import declared_rows
from firstlight.facts.planning.decode_time import DecodeTimes, Rates, busiest, distinct_experts
from firstlight.facts.planning.outline import Outline
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import Ranks
from firstlight.facts.planning.speculation_gain import (
    DraftCost,
    acceptance_length,
    break_even,
    observed_break_even,
)
from firstlight.facts.planning.tensor_groups import group_rows
from support.checkpoints import tiny_description
from support.experts import description_of

RING = modelled("ring", LINKS["pcie"], 8)


def with_experts(architecture: str) -> ModelDescription:
    """Whose experts can be split in two."""
    description = description_of(architecture)
    experts = description.experts
    assert experts is not None
    return replace(description, experts=replace(experts, inner_size=64, shared_size=2 * experts.shared_size))


def times_of(description: ModelDescription, ranks: Ranks, rates: Rates | None = None) -> DecodeTimes:
    groups = tuple(group_rows(declared_rows(description, DeclaredWeights("BF16"))))
    weights = RankWeights(Outline("tiny", description, groups, 0, ()), ranks)
    reduce = modelled("ring", LINKS["pcie"], ranks.num)
    return DecodeTimes(weights, rates or Rates(1e9, 0.0), reduce, kv_token_bytes=100)


def test_algorithms_of_all_reduces() -> None:
    link = LINKS["nvlink"]
    nbytes = 1_000_000
    ring, one_shot, two_shot = (modelled(name, link, 4).of(nbytes) for name in ALGORITHMS)
    assert ring == pytest.approx(link.base_s + 6 * link.hop_s + 1.5 * nbytes / link.bytes_per_s)
    assert one_shot == pytest.approx(link.direct_s + 3 * nbytes / link.bytes_per_s)
    assert two_shot == pytest.approx(2 * link.direct_s + 1.5 * nbytes / link.bytes_per_s)
    assert modelled("ring", link, 1).of(nbytes) == 0.0


def test_measured_times_lie_on_lines() -> None:
    found = measured([(65_536, 344e-6), (4096, 45e-6), (16_384, 60e-6)], RING)
    sizes = (100, 4096, 10_240, 65_536, 114_688)
    assert [found.of(size) for size in sizes] == pytest.approx([45e-6, 45e-6, 52.5e-6, 344e-6, 628e-6])


def test_one_measured_time_sets_the_latency() -> None:
    found = measured([(14_336, 47e-6)], RING)
    assert found.of(14_336) == pytest.approx(47e-6)
    assert found.of(28_672) - found.of(14_336) == pytest.approx(RING.of(28_672) - RING.of(14_336))


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([(4096, 50e-6), (8192, 40e-6)], "must not fall with the size"),
        ([(4096, 50e-6), (4096, 60e-6)], "a size has one time"),
        ([(2**30, 5e-6)], "less than 1073741824 bytes take at 25 GB/s"),
    ],
)
def test_times_that_cannot_be(points: list[tuple[int, float]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        measured(points, RING)


def test_distinct_experts() -> None:
    found = [round(distinct_experts(384, 8, tokens), 1) for tokens in range(1, 6)]
    assert found == [8.0, 15.8, 23.5, 31.0, 38.4]


def test_the_busiest_rank() -> None:
    assert busiest(8.0, 1) == 8.0
    assert busiest(1.0, 8) == pytest.approx(
        0.66, abs=0.05
    )  # bins counted as independent: a little less than 1
    assert 2.2 < busiest(8.0, 8) < 2.6


def test_a_step_reads_each_weight_once_and_the_embedding_not() -> None:
    description = tiny_description()
    times = times_of(description, Ranks(1))
    table = description.vocab_size * description.hidden_size * 2
    assert times.read_bytes(1) == times.read_bytes(5) == times.weights.outline.total_bytes - table
    tied = tiny_description(tie_embeddings=True)
    assert times_of(tied, Ranks(1)).read_bytes(1) == times_of(tied, Ranks(1)).weights.outline.total_bytes
    assert times.num_all_reduces == 0
    assert times_of(description, Ranks(2)).num_all_reduces == 2 * description.num_layers


def test_parts_of_a_step_add_up() -> None:
    times = times_of(with_experts("kimi_k2"), Ranks(2), Rates(1e9, 1e-5))
    step = times.step(4, 2, context=50)
    assert step.kv_s == pytest.approx(2 * 50 * 100 / 1e9)
    assert step.other_s == pytest.approx(3e-5)
    assert step.all_reduce_s == pytest.approx(6 * times.all_reduce.of(4 * 64 * 2))
    parts = step.weights_s + step.kv_s + step.all_reduce_s + step.other_s
    assert step.total_s == pytest.approx(parts)
    assert step.all_reduce_share == pytest.approx(step.all_reduce_s / parts)


@given(st.sampled_from(["kimi_k2", "mixtral"]), st.integers(1, 40), st.booleans())
def test_more_tokens_never_take_less(architecture: str, tokens: int, whole_experts: bool) -> None:
    times = times_of(with_experts(architecture), Ranks(2, whole_experts))
    fewer, more = (times.step(number) for number in (tokens, tokens + 1))
    assert fewer.total_s <= more.total_s
    assert more.weight_bytes <= max(times.weights.rank_bytes(rank) for rank in range(2))


def test_break_even_of_what_was_observed() -> None:
    found = [observed_break_even(drafts, 0.15, 0.66, 0.0) for drafts in (2, 3, 4, 5)]
    assert [round(row.round_cost, 2) for row in found] == [1.97, 2.2, 2.42, 2.65]
    assert [round(row.acceptance or 0.0, 2) for row in found] == [0.48, 0.4, 0.36, 0.33]
    assert 3.0 / found[1].round_cost == pytest.approx(1.36, abs=0.01)


@given(st.integers(1, 8), st.floats(0.05, 0.95))
def test_break_even_is_where_there_is_no_gain(drafts: int, chance: float) -> None:
    length = acceptance_length(chance, drafts)
    row = observed_break_even(drafts, (length - 1.0) / drafts, length / length, chance)
    assert row.round_cost == pytest.approx(length)
    assert row.chance == pytest.approx(chance, abs=1e-6)
    assert row.gain == pytest.approx(1.0)


def test_drafts_that_can_never_pay() -> None:
    row = observed_break_even(2, 1.0, 0.5, 1.0)
    assert (row.acceptance, row.chance) == (None, None)
    assert row.gain == pytest.approx(0.5)


def test_longer_drafts_cost_more() -> None:
    times = times_of(with_experts("kimi_k2"), Ranks(2), Rates(1e9, 1e-5))
    cost = DraftCost.eagle3(times, vocabulary=32)
    rows = [break_even(times, cost, drafts, (1, 64), 0.6) for drafts in range(1, 6)]
    costs = [row.round_cost for row in rows]
    assert costs == sorted(costs)
    assert costs[0] > 1.0
    alone = times.step(1, 1, 64).total_s
    by_hand = (times.step(2, 1, 64).total_s + cost.seconds(times, 1)) / alone
    assert costs[0] == pytest.approx(by_hand)
