"""Grouped products of experts: the bits of a loop over the experts with the ordinary product."""

from __future__ import annotations

import itertools

import pytest
import torch

from firstlight.ops.cpu.library import open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend
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
