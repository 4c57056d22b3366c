"""Grouped products of experts: the bits of a loop over the experts with the ordinary product."""

from __future__ import annotations

import itertools

import pytest
import torch

from firstlight.facts.description import Experts
from firstlight.ops.cpu.library import open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.expert_layer import SortedExperts
from support.operators import FORMATS, matrix, random_values

OUTPUTS, INPUTS = 43, 256
COUNTS = (
    (0, 0, 0, 5, 0),  # one expert only
    (1, 0, 2, 0, 130),  # the last has more than a block of rows
    (3, 1, 0, 0, 0),
    (2, 3, 4, 5, 6),
    (0, 0, 0, 0, 0),
)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ops(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(open_pool(open_library(), request.param))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_each_row_meets_its_expert(ops: NativeBackend, weight_format: str) -> None:
    weights = [
        matrix(random_values(OUTPUTS, INPUTS, seed=seed, scale=0.05), weight_format)
        for seed in range(len(COUNTS[0]))
    ]
    experts = ops.grouped_linear(len(weights))
    for group, weight in enumerate(weights):
        experts.put(group, weight)
    single = [ops.linear(weight, role="layer") for weight in weights]
    for counts in COUNTS:
        starts = torch.tensor([0, *itertools.accumulate(counts)])
        x = random_values(sum(counts), INPUTS, seed=9)
        got = experts(x, starts)
        expected = [
            op(x[first:last]) for op, first, last in zip(single, starts[:-1], starts[1:], strict=True)
        ]
        assert torch.equal(got, torch.cat(expected)), counts


def test_an_expert_without_rows_is_not_read(ops: NativeBackend) -> None:
    weights = [matrix(random_values(OUTPUTS, INPUTS, seed=seed), "F32") for seed in range(3)]
    experts = ops.grouped_linear(len(weights))
    for group, weight in enumerate(weights):
        experts.put(group, weight)
    x = random_values(4, INPUTS, seed=9)
    starts = torch.tensor([0, 2, 2, 4])
    expected = experts(x, starts)
    each = len(experts.packed) // 3
    experts.packed[each : 2 * each].view(torch.float32).fill_(torch.nan)
    assert torch.equal(experts(x, starts), expected)


RULES = {
    "softmax": Experts(num=12, num_chosen=3, inner_size=64),
    "softmax of the chosen groups": Experts(
        num=12, num_chosen=3, inner_size=64, num_groups=4, num_chosen_groups=2, normalises=False, scale=4.0
    ),
    "sigmoid, bias and groups": Experts(
        num=12, num_chosen=4, inner_size=64, scoring="sigmoid", has_bias=True, num_groups=3,
        num_chosen_groups=2, num_group_scores=2, scale=2.5,
    ),
    "groups of one": Experts(num=12, num_chosen=2, inner_size=64, num_groups=12, num_chosen_groups=12),
}  # fmt: skip


@pytest.mark.parametrize("weight_format", ["F32", "Q4_0"])
@pytest.mark.parametrize("name", RULES)
def test_a_layer_is_what_its_operators_give_one_by_one(
    ops: NativeBackend, name: str, weight_format: str
) -> None:
    rule = RULES[name]
    gate_up, down = ops.grouped_linear(rule.num), ops.grouped_linear(rule.num)
    for expert in range(rule.num):
        both = random_values(2 * rule.inner_size, INPUTS, seed=expert, scale=0.05)
        gate_up.put(expert, matrix(both, weight_format))
        back = random_values(INPUTS, rule.inner_size, seed=50 + expert, scale=0.05)
        down.put(expert, matrix(back, weight_format))
    layer = ops.expert_layer(rule, range(rule.num), gate_up, down)
    x, scores = random_values(70, INPUTS, seed=3), random_values(70, rule.num, seed=4, scale=2.0)
    bias = random_values(rule.num, seed=5) if rule.has_bias else None
    got = layer(x, scores, bias)
    expected = SortedExperts(rule, range(rule.num), gate_up, down, ops.gated_silu)(x, scores, bias)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for row in (0, 33, 69):
        assert layer(x[row : row + 1], scores[row : row + 1], bias).equal(got[row : row + 1])
