"""Rows that wait: after all are written, every slot holds what writing at once would have left there."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.speculation.waiting import MAX_WAITING, TrueRows, Waiting

NUM_SLOTS = 12
LARGE = 3 * MAX_WAITING


class Slots:
    """A layer whose content depends on the row and on what the slot before it holds, as draft keys do."""

    def __init__(self, num_slots: int) -> None:
        self.states, self.keys = np.zeros(num_slots), np.zeros(num_slots)
        self.num_writes = 0

    def write(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:  # noqa: N803
        assert len(set(rows.slots.tolist())) == len(rows.slots), "a slot twice: the order is lost"
        self.num_writes += 1
        self.states[rows.slots] = states_TCH[:, 0, 0].numpy()
        self.keys[rows.slots] = self.states[rows.before] * 1000 + rows.tokens * 10 + rows.positions


def step_of(slots: list[int], seed: int) -> tuple[torch.Tensor, TrueRows]:
    draw = np.random.default_rng(seed)
    num = len(slots)
    before = draw.integers(0, NUM_SLOTS, num)
    rows = TrueRows(draw.integers(0, 90, num), draw.integers(0, 9, num), np.array(slots, np.int64), before)
    return torch.from_numpy(draw.integers(1, 99, (num, 1, 1))).float(), rows


@given(
    st.lists(st.lists(st.integers(1, NUM_SLOTS - 1), unique=True, min_size=1), max_size=30),
    st.sets(st.integers(0, 29)),
)
@settings(max_examples=60, deadline=None)
def test_waiting_changes_nothing(steps: list[list[int]], looked: set[int]) -> None:
    at_once, late = Slots(NUM_SLOTS), Slots(NUM_SLOTS)
    waiting = Waiting(late.write, NUM_SLOTS)
    for number, slots in enumerate(steps):
        states, rows = step_of(slots, number)
        at_once.write(states, rows)
        waiting.add(states, rows)
        states.zero_()  # the engine writes the next step's states there
        if number in looked:
            waiting.write_all()
            assert late.keys.tolist() == at_once.keys.tolist()
    waiting.write_all()
    assert late.states.tolist() == at_once.states.tolist()
    assert late.keys.tolist() == at_once.keys.tolist()


def test_rows_are_written_together() -> None:
    late = Slots(LARGE)
    waiting = Waiting(late.write, LARGE)

    def add(first: int, end: int) -> None:
        slots = np.arange(first, end)
        waiting.add(torch.ones(end - first, 1, 1), TrueRows(slots, slots, slots, slots - 1))

    for slot in range(1, MAX_WAITING + 1):
        add(slot, slot + 1)
    assert late.num_writes == 0
    add(MAX_WAITING + 1, MAX_WAITING + 2)
    assert late.num_writes == 1
    add(MAX_WAITING + 2, LARGE)
    assert late.num_writes == 3, "more than may wait: what waits, and then they themselves"
