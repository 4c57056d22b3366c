"""A product of some outputs gives them the bits of the whole product, also in a recorded step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from firstlight.base.errors import UnsupportedError
from firstlight.ops.contract import AttentionShape, Backend
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.library import Step, address, open_library, open_pool
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.packed import LAYOUTS
from firstlight.ops.cpu.recorder import NativeTape
from firstlight.ops.reference import ReferenceBackend
from support.operators import FORMATS, NESTED, matrix, random_values

INPUTS = 256


def native() -> NativeBackend:
    return NativeBackend(open_pool(open_library(), 2))


def backends() -> list[Backend]:
    return [native(), ReferenceBackend("test"), CpuBackend("test")]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_outputs_keep_their_bits(weight_format: str) -> None:
    """Random lists: unsorted, with repetitions, of one output, of more than the matrix has, across tiles."""
    ops, chance = native(), random.Random(weight_format)
    for _ in range(12):
        num_outputs, num_rows = chance.randint(1, 70), chance.randint(1, 9)
        inputs = INPUTS * chance.randint(1, 2) if weight_format in NESTED else 32 * chance.randint(1, 9)
        whole = ops.linear(matrix(random_values(num_outputs, inputs, seed=1), weight_format), role="head")
        wanted = torch.tensor([chance.randrange(num_outputs) for _ in range(chance.randint(1, 90))])
        some = ops.only_outputs(whole, wanted, num_outputs)
        x = random_values(num_rows, inputs, seed=2)
        assert torch.equal(some(x), whole(x)[:, wanted])
        rows = whole.rows(wanted)
        assert rows is not None
        assert torch.equal(some.rows(torch.arange(len(wanted))), rows)
        assert some.num_bytes == LAYOUTS[some.number].packed_bytes(len(wanted), inputs)


def test_every_backend_gives_the_same_outputs() -> None:
    weight, wanted = matrix(random_values(64, INPUTS, seed=3), "F32"), torch.tensor([63, 0, 17, 17])
    x = random_values(3, INPUTS, seed=4)
    for ops in backends():
        whole = ops.linear(weight, role="head")
        some = ops.only_outputs(whole, wanted, 64)
        assert torch.equal(some(x), whole(x)[:, wanted]), ops.name
        rows, all_rows = some.rows(torch.tensor([1, 2])), whole.rows(torch.tensor([0, 17]))
        assert (rows is None) == (all_rows is None), ops.name
        assert rows is None or all_rows is None or torch.equal(rows, all_rows), ops.name


@pytest.mark.parametrize("wanted", [[], [-1], [3, 64]])
def test_a_list_that_does_not_fit_is_refused(wanted: list[int]) -> None:
    for ops in backends():
        whole = ops.linear(matrix(random_values(64, INPUTS, seed=3), "F32"), role="head")
        with pytest.raises(UnsupportedError, match="a list of outputs names"):
            ops.only_outputs(whole, torch.tensor(wanted, dtype=torch.int64), 64)


def recorded_logits(ops: NativeBackend, head: object, residual_TH: torch.Tensor) -> torch.Tensor:
    """The logits of the last two rows, of a step that is the final norm and this head."""
    num_rows, hidden = residual_TH.shape
    shape = AttentionShape(1, 1, 8, None)
    tape = NativeTape(ops, shape, ([], []), num_rows, (hidden, 0), lambda name: 1)
    tape.embed(None, lambda tokens_T: residual_TH[tokens_T])
    weight = torch.ones(hidden)
    tape.logits([head], tape.norm(weight, 1e-5, of_logit_rows=True), None)
    wanted, tokens = np.array([num_rows - 2, num_rows - 1]), np.arange(num_rows)
    step = Step(num_rows=num_rows, num_logits=2, logit_rows=address(wanted), tokens=address(tokens))
    return tape.run(step, tokens).clone()


@pytest.mark.parametrize("weight_format", ["Q4_1", "Q8_0", "Q6_K", "F16"])
def test_a_recorded_head_of_some_outputs(weight_format: str) -> None:
    ops = native()
    whole = ops.linear(matrix(random_values(203, INPUTS, seed=5), weight_format), role="head")
    wanted = torch.arange(0, 203, 7).flip(0)
    some = ops.only_outputs(whole, wanted, 203)
    residual = random_values(5, INPUTS, seed=6)
    got = recorded_logits(ops, some, residual)
    assert torch.equal(got, recorded_logits(ops, whole, residual)[:, wanted])
