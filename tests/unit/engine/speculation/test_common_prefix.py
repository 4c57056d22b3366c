"""What two rows begin with, whatever comes behind."""

from __future__ import annotations

import pytest

from firstlight.engine.speculation.common_prefix import common_prefix


@pytest.mark.parametrize(
    ("one", "other", "num"),
    [
        ([], [], 0),
        ([1, 2], [], 0),
        ([1, 2], [2, 2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 5, 3], 1),  # alike again behind the difference
        ([0, 0], (0, 1), 1),
    ],
)
def test_it_ends_at_the_first_difference(one: list[int], other: list[int], num: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == num
