"""Prompt lookup: the longest and latest match counts, short ones do not, and periods go on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.ngram import LONGEST_MATCH, MAX_LOOKBACK, NgramDrafter, continuation


def plain(tokens: list[int], num: int) -> list[int]:
    """The definition, place by place."""
    best, best_length = None, 1
    end = len(tokens) - 1
    for place in range(end):
        length = 0
        while length < LONGEST_MATCH and length <= place and tokens[place - length] == tokens[end - length]:
            length += 1
        if length >= max(best_length, 2):
            best, best_length = place, length
    if best is None:
        return []
    drafts: list[int] = []
    for number in range(num):
        at = best + 1 + number
        drafts.append(tokens[at] if at <= end else drafts[number - (end - best)])
    return drafts


@pytest.mark.parametrize(
    ("tokens", "num", "expected"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([1, 2, 3, 4, 5], 3, []),
        ([7, 1, 8, 1], 3, []),
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, [4, 8]),
        ([5, 1, 2, 3, 9, 1, 2, 4, 8, 5, 1, 2], 2, [3, 9]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([6, 6, 6], 4, [6, 6, 6, 6]),
    ],
)
def test_what_followed_the_longest_and_latest_match(tokens: list[int], num: int, expected: list[int]) -> None:
    assert continuation(np.array(tokens, np.int64), num) == expected


def test_random_texts_of_few_words_agree_with_the_definition() -> None:
    chance = random.Random(1)
    for _ in range(300):
        tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 60))]
        assert continuation(np.array(tokens), 5) == plain(tokens, 5)


def test_a_sequence_is_followed_as_it_grows_and_looked_at_from_its_end() -> None:
    sequence = Sequence(Submit("r", [1, 2, 3], SamplingParams()), 0, frozenset(), 10**6)
    drafter = NgramDrafter()
    chance = random.Random(2)
    for _ in range(40):
        sequence.tokens.extend(chance.randrange(4) for _ in range(chance.randrange(1, 40)))
        assert drafter.propose([sequence], 4) == [plain(sequence.tokens, 4)]
    old = [8, 9, 7]
    sequence.tokens[:] = [*sequence.tokens, *old, *[5] * MAX_LOOKBACK, 8, 9]
    assert drafter.propose([sequence], 1) == [[]]
