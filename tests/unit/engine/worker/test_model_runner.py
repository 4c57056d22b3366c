"""From a plan to rows: page tables that change only by what a plan announces, positions and slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.worker.kv_pool import KVPool
from firstlight.engine.worker.model_runner import PageTables
from firstlight.ops.contract import AttentionShape
from firstlight.ops.reference import ReferenceBackend
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.engines import Harness, submit


def plan(entries: list[tuple[int, int, int]], pages: list[tuple[int, int, list[int]]]) -> StepPlan:
    """Entries of (slot, start, count)."""
    slots, starts, counts = (list(values) for values in zip(*entries, strict=True))
    return StepPlan(0, slots, starts, counts, [0] * sum(counts), [], pages)


def test_rows_of_mixed_entries() -> None:
    tables = PageTables(num_slots=4, max_pages=8, page_size=4)
    rows = tables.rows(plan([(2, 3, 3), (0, 9, 1)], [(2, 0, [7, 5]), (0, 0, [1, 2, 3])]))
    assert rows.positions_T.tolist() == [3, 4, 5, 9]
    assert rows.sequence_T.tolist() == [0, 0, 0, 1]
    assert rows.write_slots_T.tolist() == [7 * 4 + 3, 5 * 4 + 0, 5 * 4 + 1, 3 * 4 + 1]
    assert rows.page_table_SP[:, :3].tolist() == [[7, 5, 0], [1, 2, 3]]
    assert (list(rows.starts), list(rows.counts)) == ([3, 9], [3, 1])


def test_changes_are_kept_and_later_ones_win() -> None:
    tables = PageTables(num_slots=2, max_pages=8, page_size=4)
    tables.rows(plan([(0, 0, 5)], [(0, 0, [3, 4])]))
    rows = tables.rows(plan([(0, 5, 4)], [(0, 1, [9]), (0, 2, [6]), (0, 1, [8])]))
    assert rows.page_table_SP[0, :3].tolist() == [3, 8, 6]


def test_a_slot_that_changes_hands_shows_only_its_present_owner() -> None:
    tables = PageTables(num_slots=1, max_pages=8, page_size=4)
    tables.rows(plan([(0, 0, 12)], [(0, 0, [1, 2, 3])]))
    rows = tables.rows(plan([(0, 0, 2)], [(0, 3, [4]), (0, 0, [5])]))
    assert rows.write_slots_T.tolist() == [20, 21]
    assert rows.page_table_SP.shape[1] == 1


def test_the_null_page_of_a_pool_is_zeroed() -> None:
    pool = KVPool(2, 12, AttentionShape(3, 3, 4, None), ReferenceBackend("test"))
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(7.0)
    pool.zero_null_page(4)
    for tensor in (*pool.keys, *pool.values):
        assert not tensor[:4].any()
        assert bool((tensor[4:] == 7.0).all())


def test_latents_that_move_move_once() -> None:
    """Keys and values are the same rows; the second of two moves would take what the first one brought."""
    plain = AttentionShape(2, 2, 4, None)
    pool = KVPool(1, 8, AttentionShape(2, 1, 4, None, None, 3, plain), ReferenceBackend("test"))
    pool.keys[0].copy_(torch.arange(8.0)[:, None, None].expand(-1, 1, 4))
    pool.move([5, 6], [4, 5])
    assert pool.values[0][:, 0, 0].tolist() == [0, 1, 2, 3, 5, 6, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_garbage_in_free_pages_reaches_nobody(tmp_path: Path, dtype: str) -> None:
    """The pool is allocated without being cleared; NaN in it must not matter, except in the null page."""
    description = tiny_description()
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    work = [submit(str(n), range(3, 10 + 13 * n), max_tokens=6, logprobs=1) for n in range(4)]
    soiled = Harness(folder, dtype=dtype)
    pool = soiled.started.runner._pool
    for tensor in (*pool.keys, *pool.values):
        tensor[16:] = torch.nan
    results = soiled.run(work)
    assert {result.finish_reason for result in results.values()} == {"length"}
    if dtype == "float32":  # "auto" measures its layouts: two engines may round differently
        expected = Harness(folder).run(work)
        assert all(results[name].same_bits(expected[name]) for name in expected)
