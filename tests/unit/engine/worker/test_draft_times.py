"""Times of drafts at the start: what a busy machine delays does not count for more than it can take."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows

import pytest

from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.policy import Policy
from firstlight.engine.speculation.shape import chain
from firstlight.engine.speculation.speculation import Speculation
from firstlight.engine.worker.step_times import time_drafts
from support.sampling import sequence


class Slow:
    """Takes what it is told to, on a clock of its own."""

    name, layers, is_model = "slow", (), True

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.now_s, self._seconds = 0.0, seconds

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        """Nothing."""

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        self.now_s += self._seconds[num].pop(0)
        return [[0] * num for _ in sequences]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: [9.0, 1.0], 2: [1.5, 8.0], 3: [2.0, 2.0]}, {1: 1.0, 2: 1.5, 3: 2.0}),  # the quicker one counts
        ({1: [1.0, 1.0], 2: [30.0, 20.0], 3: [2.5, 2.6]}, {1: 1.0, 2: 2.0, 3: 2.5}),
        ({1: [4.0, 5.0], 2: [2.0, 2.0], 3: [9.0, 9.0]}, {1: 4.0, 2: 2.0, 3: 3.0}),
    ],
)
def test_a_delay_counts_for_no_more_than_drafts_of_one(
    seconds: dict[int, list[float]], expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Slow(seconds)
    monkeypatch.setattr("time.perf_counter", lambda: drafter.now_s)
    policy = Policy(3)
    time_drafts(Speculation(drafter, policy), [sequence([1, 2], [])], time.monotonic() + 1000.0)
    assert {shape.depth: policy.draft_time(shape, 1) for shape in policy.timed_drafts} == pytest.approx(
        expected
    )


def test_a_step_of_prompts_alone_changes_nothing_that_is_told() -> None:
    policy = Policy(2, adapts=False)
    speculation = Speculation(Slow({2: [1.0]}), policy)
    speculation.begin({})
    speculation.propose([sequence([1, 2], [])])
    told = (speculation.counts.now, speculation.counts.reason)
    assert told == (2, "--no-draft-adapt")
    speculation.propose([])
    assert (speculation.counts.now, speculation.counts.reason) == told


def test_four_sequences_take_no_longer_than_four_times_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Slow({1: [1.0, 1.0, 50.0, 60.0]})
    monkeypatch.setattr("time.perf_counter", lambda: drafter.now_s)
    policy = Policy(1)
    sequences = [sequence([1, 2], []) for _ in range(4)]
    for some in (sequences[:1], sequences):
        time_drafts(Speculation(drafter, policy), some, time.monotonic() + 1000.0)
    assert policy.draft_time(chain(1), 4) == pytest.approx(4.0)
