"""A node of a tree attends to its context and its branch alone, like a plain row whose branch lies in order.

Bit for bit where rows are invariant: on the reference with every type of KV, and on our own kernels on each
instruction set; close on the other forms.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from firstlight.engine.speculation.tree import ROOT
from firstlight.ops import padded_attention
from firstlight.ops.contract import AttentionShape, Backend, StepRows
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.kv_rows import pack
from firstlight.ops.reference import ReferenceBackend
from support.native_sets import instruction_sets, pool_of
from support.operators import Paged, random_values

# Roots across the borders of pages, spans (64) and parts (128); trees of one block of rows, and of several.
STARTS, NODES = (0, 3, 62, 120, 127, 200), (3, 7, 40)
DTYPES = ("float16", "bfloat16", "int8")


def random_tree(num: int, chance: random.Random, deepest: int = 6) -> list[int]:
    depths, parents = [0], []
    for place in range(num):
        parent = chance.choice([at for at in range(-1, place) if depths[at + 1] < deepest])
        parents.append(parent)
        depths.append(depths[parent + 1] + 1)
    return parents


def case(number: int, window: int | None, page_size: int) -> tuple[Paged, StepRows]:
    """Two trees beside a chunk of a prompt and a plain row."""
    chance = random.Random(number)
    shape = AttentionShape(6, 2, 16, window)
    start, num, other = STARTS[number % 6], NODES[number % 3], STARTS[(number + 2) % 6]
    lengths = (start + 1 + num, 90, other + 4, 33)
    paged = Paged.random(shape, lengths, page_size, seed=number)
    entries = [(0, start, 1 + num), (1, 40, 50), (2, other, 4), (3, 32, 1)]
    parents = {0: random_tree(num, chance), 2: [ROOT, ROOT, 1]}
    return paged, paged.rows_with_trees(entries, parents)


def attend(ops: Backend, paged: Paged, rows: StepRows, q: torch.Tensor) -> torch.Tensor:
    keys, values = pack(paged.keys, ops.key_dtype), pack(paged.values, ops.value_dtype)
    return ops.attend(q, keys, values, ops.plan_attention(rows, paged.shape))


def assert_as_in_order(ops: Backend, number: int, window: int | None, page_size: int) -> None:
    paged, rows = case(number, window, page_size)
    q = random_values(len(rows.positions_T), paged.shape.num_heads, paged.shape.head_size, seed=9)
    got = attend(ops, paged, rows, q)
    for row in range(len(q)):
        other, alone = paged.straightened(rows, row)
        expected = attend(ops, other, alone, q[row : row + 1])[0]
        if ops.row_invariant:
            assert torch.equal(got[row], expected), row
        else:
            assert float((got[row] - expected).abs().max()) < 2e-3, row


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("kv_dtype", ["auto", *DTYPES])
def test_on_the_reference(kv_dtype: str, window: int | None) -> None:
    for number in range(3):
        assert_as_in_order(ReferenceBackend("test", kv_dtype), number, window, 16)
    assert_as_in_order(ReferenceBackend("test", kv_dtype), 3, window, 1)


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_on_our_own_kernels(name: str, kv_dtype: str) -> None:
    """Two threads share long histories of few rows."""
    ops = NativeBackend(pool_of(name), kv_dtype=kv_dtype)
    for number in range(12):
        assert_as_in_order(ops, number, (None, 5, 64)[number % 3 - number // 6], (16, 1, 7)[number % 3])


def test_on_stock_operators() -> None:
    for number in range(6):
        assert_as_in_order(CpuBackend("test"), number, (None, 5, 64)[number % 3], 16)


@pytest.mark.parametrize("window", [None, 5, 64])
def test_in_padded_batches(window: int | None) -> None:
    for number in range(6):
        paged, rows = case(number, window, 16)
        q = random_values(len(rows.positions_T), paged.shape.num_heads, paged.shape.head_size, seed=9)
        got = torch.full(q.shape, torch.nan)
        batches = padded_attention.plan(rows, paged.shape, [0, 1, 2, 3], torch.device("cpu"))
        padded_attention.attend(q, paged.keys, paged.values, batches, got)
        assert float((got - attend(ReferenceBackend("test"), paged, rows, q)).abs().max()) < 2e-6


def test_a_chain_as_a_tree_has_the_bits_of_a_chunk() -> None:
    paged = Paged.random(AttentionShape(6, 2, 16, None), (140,))
    rows = paged.rows([(0, 120, 9)])
    q = random_values(9, 6, 16, seed=9)
    tree = paged.rows_with_trees([(0, 120, 9)], {0: list(range(-1, 7))})
    assert np.array_equal(tree.positions_T, rows.positions_T)
    for ops in (ReferenceBackend("test"), NativeBackend(pool_of(instruction_sets()[0]))):
        assert torch.equal(attend(ops, paged, tree, q), attend(ops, paged, rows, q))
