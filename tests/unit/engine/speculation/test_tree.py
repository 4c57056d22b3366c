"""Trees of drafts as lists: ways through them, beginnings of them, and where their rows lie."""

from __future__ import annotations

import numpy as np

from firstlight.engine.speculation.tree import (
    ROOT,
    branches,
    depths,
    find,
    first_path,
    lay_out,
    num_within,
    path_of,
)

DRAFTS, PARENTS = [10, 20, 11, 21, 12, 11], [ROOT, ROOT, 0, 1, 2, 1]


def test_ways_through_a_tree() -> None:
    assert depths(PARENTS) == [1, 1, 2, 2, 3, 2]
    assert path_of(DRAFTS, PARENTS, [20, 11, 12]) == [1, 5]
    assert path_of(DRAFTS, PARENTS, [10, 11, 12, 13]) == [0, 2, 4]
    assert path_of(DRAFTS, PARENTS, [11]) == []
    assert first_path(PARENTS) == [0, 2, 4]
    assert find(DRAFTS, PARENTS, 11, 1) == 5


def test_a_chain_needs_no_parents() -> None:
    assert path_of([5, 5, 6], [], [5, 5, 7]) == [0, 1]
    assert find([5, 5, 6], [], 6, 2) is None


def test_the_beginning_of_a_tree_is_a_tree() -> None:
    assert [num_within(PARENTS, most, 9) for most in (0, 3, 9)] == [0, 3, 6]
    assert [num_within(PARENTS, 9, depth) for depth in (0, 1, 2, 3)] == [0, 2, 4, 6]


def test_rows_beside_a_chunk() -> None:
    assert branches(PARENTS[:4]) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    positions = np.array([4, 5, 6, 30, 31, 32, 33])
    table = lay_out([(1, [ROOT, ROOT, 0])], np.array([4, 30]), np.array([0, 3]), positions)
    assert positions.tolist() == [4, 5, 6, 30, 31, 31, 32]
    none = [-1, -1, -1]
    assert table.tolist() == [none, none, none, [30, -1, -1], [30, 31, -1], [30, 32, -1], [30, 31, 33]]
