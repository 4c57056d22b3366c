"""A tree of drafts: several guesses in a place, each with guesses of its own behind it. Pure functions.

Drafts are a list of tokens, and `parents[i]` is the place in that list of the draft before the i-th one, or
`ROOT`, the last known token. A chain has no parents: each draft follows the one before it. Invariant: a draft
comes after its parent, so the beginning of a tree is a tree; and drafts with one parent are different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

ROOT = -1


def depths(parents: Rows[int]) -> list[int]:
    """How many drafts lead to each one, itself included."""
    made: list[int] = []
    for parent in parents:
        made.append(1 if parent == ROOT else made[parent] + 1)
    return made


def behind(drafts: Rows[int], parents: Rows[int], place: int) -> Rows[int]:
    """The places of the drafts that follow the one in `place`."""
    if parents:
        return [after for after in range(place + 1, len(drafts)) if parents[after] == place]
    return range(place + 1, min(place + 2, len(drafts)))


def find(drafts: Rows[int], parents: Rows[int], token: int, place: int) -> int | None:
    """The place of the draft behind `place` that is this token."""
    return next((after for after in behind(drafts, parents, place) if drafts[after] == token), None)


def path_of(drafts: Rows[int], parents: Rows[int], tokens: Rows[int]) -> list[int]:
    """The places of the drafts that are these tokens one after the other, as far as there are any."""
    path: list[int] = []
    for token in tokens:
        place = find(drafts, parents, token, path[-1] if path else ROOT)
        if place is None:
            break
        path.append(place)
    return path


def first_path(parents: Rows[int]) -> list[int]:
    """The places of the chain that takes the first of the drafts each time."""
    path: list[int] = []
    for place, parent in enumerate(parents):
        if parent == (path[-1] if path else ROOT):
            path.append(place)
    return path


def num_within(parents: Rows[int], most: int, most_in_a_row: int) -> int:
    """How long a beginning of a tree has at most so many drafts, and so many one behind the other."""
    for place, depth in enumerate(depths(parents)[:most]):
        if depth > most_in_a_row:
            return place
    return min(most, len(parents))


def branches(parents: Rows[int]) -> list[list[int]]:
    """For the last known token and then each draft: the rows that lead to it, from that token's, which is
    0."""
    made = [[0]]
    for place, parent in enumerate(parents):
        made.append([*made[parent + 1], place + 1])
    return made


def lay_out(
    trees: Rows[tuple[int, list[int]]],
    starts: np.ndarray,
    first_rows: np.ndarray,
    positions_T: np.ndarray,
) -> np.ndarray:
    """`StepRows.branches_TW` of a step, whose rows of trees also get their positions in `positions_T`.

    `trees`: the number of a sequence in the step, and its parents.
    """
    every = [(entry, branches(parents)) for entry, parents in trees]
    width = max(len(branch) for _, found in every for branch in found)
    table_TW = np.full((len(positions_T), width), -1, np.int64)
    for entry, found in every:
        start, first = int(starts[entry]), int(first_rows[entry])
        for row, branch in enumerate(found, first):
            table_TW[row, : len(branch)] = np.add(branch, start)
            positions_T[row] = start + len(branch) - 1
    return table_TW
