"""Rows that wait: after all are written, every slot holds what writing at once would have left there."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.speculation.deferred_kv_writes import MAX_WAITING, TrueRows, Waiting
from firstlight.ops.contract import StepRows

NUM_PAGES, PAGE_SIZE, PAGES_EACH = 9, 3, 2
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
LARGE = 3 * MAX_WAITING
Step = tuple[torch.Tensor, StepRows, list[int]]


class Slots:
    """A layer whose content depends on the row and on what the slot before it holds, as draft keys do."""

    def __init__(self, num_slots: int) -> None:
        self.states, self.keys = np.zeros(num_slots), np.zeros(num_slots)
        self.num_writes = 0

    def write(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:
        assert len(set(rows.slots.tolist())) == len(rows.slots), "a slot twice: the order is lost"
        self.num_writes += 1
        self.states[rows.slots] = states_TCH[:, 0, 0].numpy()
        self.keys[rows.slots] = self.states[rows.before] * 1000 + rows.tokens * 10 + rows.positions

    def write_plainly(self, step: Step) -> None:
        """A step's rows at once, each row by the definition of the slot before it."""
        states, rows, tokens = step
        before = []
        for row, position in enumerate(rows.positions_T.tolist()):
            place = int(rows.places(np.array([row]), np.array([[max(position - 1, 0)]]))[0, 0])
            page = int(rows.page_table_SP[rows.sequence_T[row], place // rows.page_size])
            before.append(page * rows.page_size + place % rows.page_size if position else 0)
        positions = np.maximum(rows.positions_T - 1, 0)
        self.write(states, TrueRows(np.array(tokens), positions, rows.write_slots_T, np.array(before)))


def step_of(ranges: list[tuple[int, int]], seed: int, *, is_tree: bool) -> Step:
    """Sequences with these (start, number of rows) on pages drawn by `seed`; the last may be a tree."""
    draw = np.random.default_rng(seed)
    pages = 1 + draw.permutation(NUM_PAGES - 1)
    table = pages[: len(ranges) * PAGES_EACH].reshape(-1, PAGES_EACH)
    counts = [min(count, PAGES_EACH * PAGE_SIZE - start) for start, count in ranges]
    starts = [start for start, _ in ranges]
    sequence = np.repeat(np.arange(len(ranges)), counts)
    places = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    positions, branches = places.copy(), None
    if is_tree:
        branches = np.full((len(places), 3), -1)
        first = len(places) - counts[-1]
        branches[first, 0] = places[first]
        for row in range(first + 1, len(places)):  # each node hangs on the root or on the node behind it
            parent = int(draw.choice([first, first + 1])) if row > first + 1 else first
            depth = int((branches[parent] >= 0).sum())
            branches[row, :depth] = branches[parent, :depth]
            branches[row, depth], positions[row] = places[row], places[first] + depth
    slots = table[sequence, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
    rows = StepRows(positions, sequence, slots, table, starts, counts, PAGE_SIZE, branches)
    states = torch.from_numpy(draw.integers(1, 99, (len(places), 1, 1))).float()
    return states, rows, draw.integers(0, 90, len(places)).tolist()


RANGES = st.tuples(st.integers(0, PAGES_EACH * PAGE_SIZE - 1), st.integers(1, PAGE_SIZE + 1))
STEPS = st.tuples(
    st.lists(RANGES, min_size=1, max_size=(NUM_PAGES - 1) // PAGES_EACH), st.integers(0, 3), st.booleans()
)


@given(st.lists(STEPS, max_size=30), st.sets(st.integers(0, 29)))
@settings(max_examples=60, deadline=None)
def test_waiting_changes_nothing(
    steps: list[tuple[list[tuple[int, int]], int, bool]], looked: set[int]
) -> None:
    at_once, late = Slots(NUM_SLOTS), Slots(NUM_SLOTS)
    waiting = Waiting(late.write, NUM_SLOTS)
    for number, (ranges, seed, is_tree) in enumerate(steps):
        step = step_of(ranges, seed, is_tree=is_tree)
        at_once.write_plainly(step)
        waiting.add(*step)
        step[0].zero_()  # the engine writes the next step's states there
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
        none = np.zeros(len(slots), np.int64)
        rows = StepRows(slots, none, slots, np.array([[0]]), [first], [end - first], page_size=LARGE)
        waiting.add(torch.ones(end - first, 1, 1), rows, slots.tolist())

    for slot in range(1, MAX_WAITING + 1):
        add(slot, slot + 1)
    assert late.num_writes == 0
    add(MAX_WAITING + 1, MAX_WAITING + 2)
    assert late.num_writes == 1
    add(MAX_WAITING + 2, LARGE)
    assert late.num_writes == 3, "more than may wait: what waits, and then they themselves"


def test_a_slot_that_was_read_is_written_behind_it() -> None:
    at_once, late = Slots(NUM_SLOTS), Slots(NUM_SLOTS)
    waiting = Waiting(late.write, NUM_SLOTS)
    for start in (1, 2, 1):  # the second reads the slot that the third writes anew
        step = step_of([(start, 1)], seed=0, is_tree=False)
        step[0].fill_(7 * start + at_once.num_writes)
        at_once.write_plainly(step)
        waiting.add(*step)
        if at_once.num_writes == 1:
            waiting.write_all()
    waiting.write_all()
    assert late.keys.tolist() == at_once.keys.tolist()
