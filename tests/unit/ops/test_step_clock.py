"""The clock of a step: kinds add up to the turn, inner kinds belong to outer ones, native operators tell
their own times."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
import torch

from firstlight.ops import step_clock
from firstlight.ops.cpu.library import ATTEND, EXPERTS, LINEAR, NORM, SILU, TURN_AND_WRITE
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cpu.operator_times import NativeOperatorTimes, kind_of
from firstlight.ops.cuda import step_clock as event_clock
from firstlight.ops.cuda.step_clock import EventClock
from firstlight.ops.step_clock import Kind, StepClock
from support.native_sets import instruction_sets, pool_of
from support.operators import matrix, random_values


class Hands:
    """A clock's face that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1000
        for module in (step_clock, event_clock):
            monkeypatch.setattr(module, "monotonic_ns", lambda: self.now_ns)

    def work(self, nanoseconds: int) -> int:
        self.now_ns += nanoseconds
        return nanoseconds


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def test_what_no_kind_claims_is_python(hands: Hands) -> None:
    clock = StepClock()
    clock.turn(on=True)
    hands.work(5)
    assert clock.run(Kind.MATRICES, hands.work, 30) == 30
    hands.work(7)
    spent_ns, all_ns = clock.turn(on=True)
    assert (spent_ns[Kind.PYTHON], spent_ns[Kind.MATRICES], all_ns) == (12, 30, 42)
    assert sum(spent_ns) == 42


def test_within_a_kind_only_collectives_count_by_themselves(hands: Hands) -> None:
    clock = StepClock()

    def experts() -> None:
        hands.work(10)
        clock.run(Kind.MATRICES, hands.work, 3)
        clock.run(Kind.COLLECTIVES, hands.work, 100)
        hands.work(1)

    clock.turn(on=True)
    clock.run(Kind.EXPERTS, experts)
    spent_ns, _ = clock.turn(on=True)
    assert (spent_ns[Kind.EXPERTS], spent_ns[Kind.COLLECTIVES], spent_ns[Kind.MATRICES]) == (14, 100, 0)


def test_off_it_keeps_the_length_of_the_turn_alone(hands: Hands) -> None:
    clock = StepClock()
    clock.run(Kind.MATRICES, hands.work, 50)
    clock.turn(on=False)
    clock.run(Kind.MATRICES, hands.work, 30)
    assert clock.turn(on=True) == ([0] * len(Kind), 30)
    clock.run(Kind.MATRICES, hands.work, 20)
    spent_ns, all_ns = clock.turn(on=False)
    assert (spent_ns[Kind.MATRICES], sum(spent_ns), all_ns) == (20, 20, 20)


def test_an_error_leaves_the_kind(hands: Hands) -> None:
    clock = StepClock()
    clock.turn(on=True)
    with pytest.raises(ZeroDivisionError):
        clock.run(Kind.SAMPLING, lambda: hands.work(9) // 0)
    hands.work(4)
    spent_ns, _ = clock.turn(on=True)
    assert (spent_ns[Kind.SAMPLING], spent_ns[Kind.PYTHON]) == (9, 4)


class Program:
    """Operators that were timed in one call."""

    def __init__(self) -> None:
        self.taken: list[tuple[Kind, int]] = []
        self.is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def take(self) -> Iterable[tuple[Kind, int]]:
        taken, self.taken = self.taken, []
        return taken


def test_a_program_of_operators_is_told_apart_but_within_a_kind(hands: Hands) -> None:
    clock = StepClock()
    program = clock.operators = Program()

    def run_program() -> None:
        hands.work(100)
        program.taken = [(Kind.MATRICES, 60), (Kind.ATTENTION, 30)]

    clock.turn(on=True)
    assert program.is_on
    run_program()
    clock.run(Kind.DRAFTING, run_program)
    spent_ns, all_ns = clock.turn(on=False)
    assert not program.is_on
    assert (spent_ns[Kind.MATRICES], spent_ns[Kind.ATTENTION], spent_ns[Kind.PYTHON]) == (60, 30, 10)
    assert (spent_ns[Kind.DRAFTING], sum(spent_ns), all_ns) == (100, 200, 200)


class HandEvent:
    """A device that does at once what is launched."""

    def __init__(self, hands: Hands) -> None:
        self.hands, self.at_ns = hands, 0

    def record(self) -> None:
        self.at_ns = self.hands.now_ns

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: HandEvent) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


def test_on_a_device_events_tell_the_times(hands: Hands) -> None:
    clock = EventClock(lambda: HandEvent(hands))
    clock.turn(on=True)
    for _ in range(2):
        hands.work(5)
        clock.run(Kind.MATRICES, hands.work, 30)
        clock.run(Kind.EXPERTS, lambda: clock.run(Kind.COLLECTIVES, hands.work, 7))
        spent_ns, all_ns = clock.turn(on=True)
        assert (spent_ns[Kind.PYTHON], spent_ns[Kind.MATRICES], spent_ns[Kind.COLLECTIVES]) == (5, 30, 7)
        assert sum(spent_ns) == all_ns == 42
    clock.turn(on=False)
    clock.run(Kind.MATRICES, hands.work, 30)
    assert clock.turn(on=False) == ([0] * len(Kind), 30)


def test_native_operators_are_timed_only_when_asked() -> None:
    pool = pool_of(instruction_sets()[-1])
    ops, times = NativeBackend(pool), NativeOperatorTimes(pool)
    product = ops.linear(matrix(random_values(256, 512, seed=1), "Q8_0"), role="layer")
    x = random_values(8, 512, seed=2)
    expected = product(x)
    assert times.take() == []
    times.start()
    began_ns = time.monotonic_ns()
    assert torch.equal(product(x), expected)
    lasted_ns = time.monotonic_ns() - began_ns
    taken = times.take()
    assert {kind for kind, _ in taken} == {Kind.MATRICES, Kind.OTHER}  # the product, and its codes
    assert 0 < sum(nanoseconds for _, nanoseconds in taken) <= lasted_ns
    assert times.take() == []
    times.stop()
    product(x)
    assert times.take() == []


def test_each_native_operator_has_a_kind() -> None:
    named = [kind_of(number) for number in (LINEAR, ATTEND, TURN_AND_WRITE, EXPERTS, NORM, SILU)]
    attention = Kind.ATTENTION
    assert named == [Kind.MATRICES, attention, attention, Kind.EXPERTS, Kind.OTHER, Kind.OTHER]
