"""The bookkeeping of a profile: which turns count, when it ends, and what is made of every rank's times."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.engine.messages import Profile, StartProfile, StopProfile, Submit, ToEngine
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import Recording, StepPlan, decode_plan, encode_plan
from firstlight.engine.worker.profile import BLOCK_TURNS, LEAST_COMPARED, Profiler, TurnTimes, obey, summary
from firstlight.ops.collectives import Group
from firstlight.ops.step_clock import WORDS, Kind


def plan(num_sequences: int = 1, rows: int = 1, samples: int | None = None, start: int = 10) -> StepPlan:
    """Of `rows` for each sequence, all of them sampled unless said."""
    num = num_sequences * rows
    wanted = list(range(num if samples is None else samples))
    counts = [rows] * num_sequences
    return StepPlan(1, list(range(num_sequences)), [start] * num_sequences, counts, [0] * num, wanted, [])


class Run:
    """A rank 0 whose steps are nothing."""

    def __init__(self) -> None:
        self.orders: list[Recording] = []
        self.profiler = Profiler(Group(), self.orders.append)

    def steps(self, num: int, of: StepPlan) -> list[Profile]:
        made = []
        for _ in range(num):
            self.profiler.saw(of)
            made.append(self.profiler.end_turn())
        return [profile for profile in made if profile is not None]

    def pause(self) -> None:
        message = Submit("a", [1], SamplingParams())
        received: list[ToEngine] = self.profiler.receive(lambda wait: [message], wait=True)
        assert received == [message]


def test_orders_cross_like_plans() -> None:
    for message in (plan(2, 3), Recording(is_on=True), Recording(is_on=False)):
        assert decode_plan(encode_plan(message)) == message


def test_it_ends_after_so_many_recorded_decode_steps() -> None:
    run = Run()
    assert run.profiler.handle(StartProfile(10)) is None
    assert run.steps(1, plan()) == []  # ranks did not begin it together
    (profile,) = run.steps(40, plan(start=20))
    assert not run.profiler.is_active
    assert run.orders == [Recording(is_on=True), Recording(is_on=False)]
    assert profile.num_steps == 10
    assert profile.num_plain_steps == 2 * BLOCK_TURNS
    assert profile.num_other_steps == 1
    (group,) = profile.groups
    assert (group.num_sequences, group.num_rows, group.num_steps, group.context_tokens) == (1, 1, 10, 20)
    assert 0.0 < group.kinds_s[0]["Python"] <= sum(group.kinds_s[0].values())
    assert set(group.kinds_s[0]) == set(WORDS.values())


def test_prompts_and_what_follows_a_pause_are_other_steps() -> None:
    run = Run()
    run.profiler.handle(StartProfile(1000))
    run.steps(1, plan())
    run.steps(5, plan(rows=7, samples=1))
    run.pause()
    run.steps(3, plan(2, 4))
    profile = run.profiler.handle(StopProfile())
    assert profile is not None
    assert profile.num_other_steps == 1 + 5 + 1
    assert profile.num_steps + profile.num_plain_steps == 2
    assert profile.overhead is None
    assert profile.other_s >= 0.0
    assert run.profiler.handle(StopProfile()) is None  # there is none


def test_one_that_begins_anew_forgets_the_last() -> None:
    run = Run()
    run.profiler.handle(StartProfile(100))
    run.steps(9, plan())
    run.profiler.handle(StartProfile(100))
    profile = run.profiler.handle(StopProfile())
    assert profile is not None
    assert (profile.num_steps, profile.num_other_steps, profile.groups) == (0, 0, [])


def test_without_a_profile_nothing_is_kept() -> None:
    run = Run()
    assert run.steps(50, plan()) == []
    run.pause()
    assert run.orders == []


def test_another_rank_records_the_turns_it_is_told_of() -> None:
    group = Group()
    turns = TurnTimes(group)
    assert obey(Recording(is_on=True), turns)
    assert group.clock.is_on
    for _ in range(BLOCK_TURNS):
        turns.end_turn()
    assert not group.clock.is_on  # the block between
    assert turns.num == BLOCK_TURNS
    assert not obey(Recording(is_on=False), turns)


def test_times_of_every_rank_are_summed_by_size() -> None:
    run = Run()
    run.profiler.handle(StartProfile(10_000))
    run.steps(1, plan())
    run.steps(39, plan(2, 1))
    run.steps(20, plan(2, 3))
    turns = run.profiler._turns
    seconds = np.zeros((len(turns), 2, len(Kind) + 1))
    seconds[:, 0, Kind.MATRICES], seconds[:, 0, -1] = 0.003, 0.004
    seconds[:, 1, Kind.WAITING], seconds[:, 1, -1] = 0.001, 0.002
    recorded = [TurnTimes.is_recorded(number) for number in range(len(turns))]
    seconds[np.flatnonzero(recorded), 0, -1] *= 1.05
    profile = summary(turns, seconds, 10.0, 1.0)
    assert (profile.num_ranks, profile.idle_s, profile.window_s) == (2, 1.0, 10.0)
    small, large = profile.groups
    assert (small.num_rows, large.num_rows) == (2, 6)
    assert small.num_steps + large.num_steps == profile.num_steps
    assert small.kinds_s[0]["matrix products"] == pytest.approx(0.003 * small.num_steps)
    assert small.kinds_s[1]["waiting"] == pytest.approx(0.001 * small.num_steps)
    assert large.wall_s == pytest.approx([0.0042 * large.num_steps, 0.002 * large.num_steps])
    assert min(small.num_steps, profile.num_plain_steps) > LEAST_COMPARED
    assert profile.overhead == pytest.approx(0.05)
