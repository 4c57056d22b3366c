"""Sparse and padded attention against naive attention and each other; row invariance of the sparse form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from firstlight.ops import padded_attention, sparse_attention
from firstlight.ops.contract import AttentionShape, StepRows
from firstlight.ops.cpu.backend import MIN_BLOCKED_ROWS, CpuBackend
from firstlight.ops.reference import ReferenceBackend
from support.operators import Paged, random_values

# Lengths across the borders of the buckets 64, 128, 256, ... and of pages.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
HEADS = {"1 group": (2, 2), "3 groups": (9, 3), "8 groups": (8, 1)}
WINDOWS = (None, 1, 16, 63, 64, 65, 100)


def shape_of(heads: str, window: int | None = None, size: int = 16) -> AttentionShape:
    return AttentionShape(*HEADS[heads], size, window)


def sparse(paged: Paged, rows: StepRows, q: torch.Tensor) -> torch.Tensor:
    ops = ReferenceBackend("test")
    return ops.attend(q, paged.keys, paged.values, ops.plan_attention(rows, paged.shape))


def padded(paged: Paged, rows: StepRows, q: torch.Tensor) -> torch.Tensor:
    out = torch.full(q.shape, torch.nan)
    batches = padded_attention.plan(rows, paged.shape, list(range(len(rows.counts))), torch.device("cpu"))
    padded_attention.attend(q, paged.keys, paged.values, batches, out)
    return out


def fast(paged: Paged, rows: StepRows, q: torch.Tensor) -> torch.Tensor:
    ops = CpuBackend("test")
    return ops.attend(q, paged.keys, paged.values, ops.plan_attention(rows, paged.shape))


FORMS = {"sparse": sparse, "padded": padded, "cpu": fast}


def queries(rows: StepRows, shape: AttentionShape, scale: float = 1.0) -> torch.Tensor:
    return random_values(len(rows.positions_T), shape.num_heads, shape.head_size, seed=9, scale=scale)


def assert_naive(paged: Paged, rows: StepRows, q: torch.Tensor, got: torch.Tensor) -> None:
    sequences = [
        s for s, num in zip(rows_sequences(paged, rows), rows.counts, strict=True) for _ in range(num)
    ]
    expected = torch.stack(
        [paged.naive(q[t], sequences[t], int(position)) for t, position in enumerate(rows.positions_T)]
    )
    assert got.dtype == torch.float32
    assert float((got.double() - expected).abs().max()) < 2e-5


def rows_sequences(paged: Paged, rows: StepRows) -> list[int]:
    """Which sequence of the pool each entry is: by its page table."""
    tables = paged.tables_SP.tolist()
    return [tables.index(table) for table in rows.page_table_SP.tolist()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_one_token_each_of_sequences_of_many_lengths(form: str, heads: str) -> None:
    paged = Paged.random(shape_of(heads), LENGTHS)
    rows = paged.rows([(s, length - 1, 1) for s, length in enumerate(LENGTHS)])
    q = queries(rows, paged.shape)
    assert_naive(paged, rows, q, FORMS[form](paged, rows, q))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_and_single_tokens_mixed_under_windows(form: str, window: int | None) -> None:
    lengths = (130, 40, 1, 200, 64, 33)
    paged = Paged.random(shape_of("3 groups", window), lengths, seed=3)
    entries = [(0, 0, 130), (3, 199, 1), (1, 3, 37), (2, 0, 1), (4, 63, 1), (5, 0, 33)]
    rows = paged.rows(entries)
    q = queries(rows, paged.shape)
    assert_naive(paged, rows, q, FORMS[form](paged, rows, q))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("page_size", "size"), [(1, 8), (4, 80), (64, 128)])
def test_other_page_and_head_sizes(form: str, page_size: int, size: int) -> None:
    paged = Paged.random(shape_of("3 groups", size=size), (70, 9), page_size)
    rows = paged.rows([(0, 10, 60), (1, 8, 1)])
    q = queries(rows, paged.shape)
    assert_naive(paged, rows, q, FORMS[form](paged, rows, q))


@pytest.mark.parametrize("form", FORMS)
def test_extreme_scores_stay_finite(form: str) -> None:
    paged = Paged.random(shape_of("3 groups"), (100, 40))
    rows = paged.rows([(0, 0, 100), (1, 39, 1)])
    q = queries(rows, paged.shape, scale=1e4)
    assert_naive(paged, rows, q, FORMS[form](paged, rows, q))


def test_padded_equals_sparse() -> None:
    lengths = tuple(range(1, 140, 7))
    for window in (None, 20):
        paged = Paged.random(shape_of("3 groups", window), lengths, seed=5)
        rows = paged.rows([(s, length // 3, length - length // 3) for s, length in enumerate(lengths)])
        q = queries(rows, paged.shape)
        assert float((padded(paged, rows, q) - sparse(paged, rows, q)).abs().max()) < 2e-6


def test_padding_does_not_read_what_is_not_a_number() -> None:
    """Free pages may hold anything: what a row may not see must not reach it."""
    paged = Paged.random(shape_of("3 groups"), (70, 35))
    rows = paged.rows([(0, 5, 65), (1, 34, 1)])
    q = queries(rows, paged.shape)
    expected = {name: form(paged, rows, q) for name, form in FORMS.items()}
    used = np.unique(paged.tables_SP)
    for page in range(len(paged.keys) // paged.page_size):
        if page not in used:
            paged.keys[page * paged.page_size : (page + 1) * paged.page_size] = torch.nan
            paged.values[page * paged.page_size : (page + 1) * paged.page_size] = torch.nan
    for name, form in FORMS.items():
        assert torch.equal(form(paged, rows, q), expected[name]), name


def test_many_sequences_take_few_operator_calls() -> None:
    paged = Paged.random(shape_of("3 groups"), [100] * 40 + [300] * 40)
    plan = sparse_attention.plan(paged.rows([(s, 90, 1) for s in range(80)]), paged.shape)
    assert len(plan.pieces) == 1
    rows = paged.rows([(s, 0, MIN_BLOCKED_ROWS) for s in range(80)])
    assert len(padded_attention.plan(rows, paged.shape, list(range(80)), torch.device("cpu"))) == 1


def test_the_cpu_backend_shares_out_the_sequences_by_their_rows() -> None:
    paged = Paged.random(shape_of("3 groups"), (50, 50, 50))
    ops = CpuBackend("test")
    rows = paged.rows([(0, 0, MIN_BLOCKED_ROWS), (1, 49, 1), (2, 0, MIN_BLOCKED_ROWS - 1)])
    plan = ops.plan_attention(rows, paged.shape)
    assert plan.sparse is not None
    assert sum(len(members) for members, _ in plan.sparse.pieces) == MIN_BLOCKED_ROWS
    assert [tuple(batch.rows_BC.shape) for batch in plan.batches] == [(1, MIN_BLOCKED_ROWS)]
    assert ops.plan_attention(paged.rows([(0, 0, 40)]), paged.shape).sparse is None


# --- row invariance, bit for bit ---


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 63, 64, 65, 200])
def test_a_row_s_bits_do_not_depend_on_its_batch(heads: str, window: int | None) -> None:
    paged = Paged.random(shape_of(heads, window), LENGTHS, seed=7)
    entries = [(s, length - 1, 1) for s, length in enumerate(LENGTHS)]
    rows = paged.rows(entries)
    q = queries(rows, paged.shape)
    together = sparse(paged, rows, q)
    for row, entry in enumerate(entries):
        assert torch.equal(sparse(paged, paged.rows([entry]), q[row : row + 1])[0], together[row]), entry
    for start, stop in ((0, 3), (5, 9), (7, 15)):
        part = sparse(paged, paged.rows(entries[start:stop]), q[start:stop])
        assert torch.equal(part, together[start:stop])
    order = np.random.default_rng(0).permutation(len(entries)).tolist()
    shuffled = sparse(paged, paged.rows([entries[row] for row in order]), q[order])
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("window", [None, 64, 100])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 1000])
def test_a_chunk_has_the_bits_of_its_parts(length: int, window: int | None) -> None:
    paged = Paged.random(shape_of("3 groups", window), (length, 30), seed=8)
    rows = paged.rows([(0, 0, length)])
    q = queries(rows, paged.shape)
    whole = sparse(paged, rows, q)
    other = random_values(1, *q.shape[1:], seed=10)
    for size in (1, 17, 64) if length < 200 else (333,):
        for start in range(0, length, size):
            num = min(size, length - start)
            # Beside another sequence, which comes first in the batch.
            part = sparse(
                paged, paged.rows([(1, 29, 1), (0, start, num)]), torch.cat((other, q[start : start + num]))
            )
            assert torch.equal(part[1:], whole[start : start + num])


def test_two_threads_change_nothing_about_it() -> None:
    torch.set_num_threads(2)
    paged = Paged.random(shape_of("3 groups", size=64), LENGTHS, seed=7)
    entries = [(s, length - 1, 1) for s, length in enumerate(LENGTHS)]
    entries.append((len(LENGTHS) - 1, 0, 200))
    rows = paged.rows(entries)
    q = queries(rows, paged.shape)
    together = sparse(paged, rows, q)
    for row, entry in enumerate(entries[:-1]):
        assert torch.equal(sparse(paged, paged.rows([entry]), q[row : row + 1])[0], together[row]), entry
    first = len(LENGTHS)
    assert torch.equal(sparse(paged, paged.rows(entries[-1:]), q[first:]), together[first:])


def test_bits_do_not_depend_on_where_the_pages_lie() -> None:
    one, other = (Paged.random(shape_of("3 groups"), (200,), seed=seed) for seed in (1, 2))
    positions = np.arange(200)
    slots = [p.tables_SP[0, positions // 16] * 16 + positions % 16 for p in (one, other)]
    other.keys[slots[1]], other.values[slots[1]] = one.keys[slots[0]], one.values[slots[0]]
    rows = [(0, 150, 50)]
    q = queries(one.rows(rows), one.shape)
    assert torch.equal(sparse(one, one.rows(rows), q), sparse(other, other.rows(rows), q))


def test_large_steps_in_pieces_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged.random(shape_of("3 groups"), (300, 90))
    rows = paged.rows([(0, 0, 300), (1, 89, 1)])
    q = queries(rows, paged.shape)
    whole = sparse(paged, rows, q)
    monkeypatch.setattr(sparse_attention, "MAX_SCORES_PER_CALL", 20_000)
    monkeypatch.setattr(sparse_attention, "MAX_KEPT_SCORES", 0)
    assert torch.equal(sparse(paged, rows, q), whole)
