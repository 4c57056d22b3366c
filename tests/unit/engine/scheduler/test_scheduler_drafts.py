"""Drafts in the scheduler: what of them is planned, what is kept, and what the prefix cache is shown."""

from __future__ import annotations

from typing import Any

import pytest

from firstlight.base.config import EngineSection
from firstlight.engine.messages import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, SequenceOutput, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.scheduler.sequence import NO_TOKEN, Sequence
from firstlight.engine.speculation.tree import ROOT

END, PAGE = 99, 4
PROMPT = [1, 2, 3, 4, 5]


def scheduler_of(pages: int = 32, **section: Any) -> Scheduler:
    sizes = {"max_num_seqs": 4, "max_batched_tokens": 16, "max_model_len": 64, "page_size_tokens": PAGE}
    return Scheduler(EngineSection(**{**sizes, **section}), pages + 1, [END])


def submit(scheduler: Scheduler, name: str = "a", prompt: list[int] = PROMPT, **params: Any) -> None:
    scheduler.submit(Submit(name, prompt, SamplingParams(**{"seed": 0, "max_tokens": 40, **params})))


def prefilled(scheduler: Scheduler, *, first: int = 6) -> list[Sequence]:
    """Runs the prompts of all that wait; each gets the token `first`."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, [[first]] * len(plan.samples))
    return scheduler.decoding_sequences()


def step(scheduler: Scheduler, drafts: dict[str, list[int]], runs: list[list[int]]) -> list[SequenceOutput]:
    plan = planned(scheduler, drafts)
    return scheduler.apply(plan, runs)


def planned(scheduler: Scheduler, drafts: dict[str, list[int]]) -> StepPlan:
    for sequence in scheduler.decoding_sequences():
        sequence.drafts = list(drafts.get(sequence.request_id, []))
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_a_plan_has_the_drafts_as_tokens_and_a_row_of_logits_for_each() -> None:
    scheduler = scheduler_of()
    submit(scheduler, "a")
    submit(scheduler, "b", [7, 8, 9])
    prefilled(scheduler)
    plan = planned(scheduler, {"a": [10, 11]})
    assert (plan.starts, plan.counts) == ([5, 3], [3, 1])
    assert plan.tokens == [6, 10, 11, 6]
    assert plan.samples == [0, 1, 2, 3]
    assert [s.request_id for s in scheduler.planned_sequences()] == ["a", "b"]


@pytest.mark.parametrize(("run", "num_pages"), [([10, 11, 12], 2), ([10, 20], 2), ([20], 2)])
def test_accepted_drafts_are_computed_and_the_others_leave_nothing(run: list[int], num_pages: int) -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    (sequence,) = prefilled(scheduler)
    (output,) = step(scheduler, {"a": [10, 11]}, [run])
    assert output.token_ids == run
    assert (output.num_drafted, output.num_accepted) == (2, len(run) - 1)
    assert sequence.tokens == [*PROMPT, 6, *run]
    assert sequence.num_computed == len(sequence.tokens) - 1
    assert len(sequence.pages) == num_pages
    assert sequence.drafts == []


def test_a_page_that_only_rejected_drafts_needed_is_free_again() -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    (sequence,) = prefilled(scheduler)
    used = scheduler.stats().pages_used
    step(scheduler, {"a": [10, 11, 12, 13]}, [[20]])
    assert len(sequence.pages) == 2
    assert scheduler.stats().pages_used == used
    scheduler.prefix.check()


def test_the_cache_is_shown_accepted_tokens_alone() -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    prefilled(scheduler)
    step(scheduler, {"a": [10, 11, 12]}, [[10, 21]])  # 1 2 3 4 | 5 6 10 (21)
    right, wrong = [*PROMPT, 6, 10, 21, 0], [*PROMPT, 6, 10, 11, 0]
    assert [len(scheduler.prefix.match(tokens, 2)) for tokens in (right, wrong)] == [1, 1]
    step(scheduler, {"a": [30, 31]}, [[30, 31, 32]])
    assert [len(scheduler.prefix.match(tokens, 2)) for tokens in (right, wrong)] == [2, 1]
    assert len(scheduler.prefix.match([*PROMPT, 6, 10, 21, 30, 31, 32, 0], 3)) == 2


def test_an_end_token_and_the_length_cut_a_run() -> None:
    scheduler = scheduler_of()
    submit(scheduler, "a", stop_token_ids=(50,))
    submit(scheduler, "b", [20, 21, 22, 23, 24], max_tokens=4)
    prefilled(scheduler)
    outputs = step(scheduler, {"a": [10, 50, 11], "b": [10, 11, 12]}, [[10, 50, 11, 12], [10, 11, 12]])
    assert [output.token_ids for output in outputs] == [[10, 50], [10, 11, 12]]
    assert [output.finish_reason for output in outputs] == [FINISH_STOP, FINISH_LENGTH]
    assert [output.num_accepted for output in outputs] == [2, 2]
    assert outputs[0].stop_token_id == 50
    assert not scheduler.has_work
    assert scheduler.stats().pages_used == 0


def test_numbers_that_are_none_end_a_run_after_what_was_accepted() -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    prefilled(scheduler)
    (output,) = step(scheduler, {"a": [10, 11]}, [[10, NO_TOKEN]])
    assert (output.token_ids, output.finish_reason) == ([10], FINISH_ERROR)
    assert not scheduler.has_work


def test_drafts_are_cut_to_the_length_that_is_left() -> None:
    scheduler = scheduler_of()
    submit(scheduler, max_tokens=3)
    prefilled(scheduler)
    assert planned(scheduler, {"a": [10, 11, 12]}).counts == [2]


def test_drafts_take_no_token_that_another_sequence_needs() -> None:
    scheduler = scheduler_of(max_batched_tokens=4)
    for name in "abc":
        submit(scheduler, name, [1])
    prefilled(scheduler)
    plan = planned(scheduler, dict.fromkeys("abc", [10, 11]))
    assert sorted(plan.counts) == [1, 1, 2]


def test_drafts_take_no_page_that_another_sequence_may_need() -> None:
    scheduler = scheduler_of(pages=16, max_model_len=64)
    submit(scheduler, "a", [1, 2, 3])
    submit(scheduler, "b", list(range(20, 70)))
    while len(scheduler.decoding_sequences()) < 2:
        prefilled(scheduler)
    plan = planned(scheduler, {"a": [10, 11, 12], "b": [10, 11, 12]})
    assert scheduler.prefix.num_available >= 1
    assert max(plan.counts) <= 4
    assert scheduler.stats().num_preemptions == 0


def planned_tree(scheduler: Scheduler, drafts: list[int], parents: list[int]) -> StepPlan:
    for sequence in scheduler.decoding_sequences():
        sequence.drafts, sequence.parents = list(drafts), list(parents)
    plan = scheduler.plan()
    assert plan is not None
    return plan


DRAFTS, PARENTS = [10, 20, 11, 21, 12], [ROOT, ROOT, 0, 1, 2]


def test_a_plan_has_a_tree_s_parents_and_a_row_of_logits_for_each_node() -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    prefilled(scheduler)
    plan = planned_tree(scheduler, DRAFTS, PARENTS)
    assert (plan.starts, plan.counts, plan.tokens) == ([5], [6], [6, *DRAFTS])
    assert plan.samples == [0, 1, 2, 3, 4, 5]
    assert plan.trees == [(0, PARENTS)]
    assert plan.moves == ([], [])


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        ([20, 21, 9], [(7, 6), (9, 7)]),  # nodes 1 and 3 lay in places 6 + 1 and 6 + 3
        ([10, 11, 12, 9], [(8, 7), (10, 8)]),
        ([10, 9], []),
        ([9], []),
    ],
)
def test_accepted_nodes_move_to_the_slots_of_their_positions(
    run: list[int], moved: list[tuple[int, int]]
) -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    (sequence,) = prefilled(scheduler)
    plan = planned_tree(scheduler, DRAFTS, PARENTS)
    pages = list(sequence.pages)
    (output,) = scheduler.apply(plan, [run])
    assert (output.num_drafted, output.num_accepted) == (5, len(run) - 1)
    assert sequence.num_computed == 6 + len(run) - 1
    assert (sequence.drafts, sequence.parents) == ([], [])
    assert len(sequence.pages) == -(-sequence.num_computed // PAGE)
    slots = [[pages[at // PAGE] * PAGE + at % PAGE for at in pair] for pair in moved]
    expected = [list(side) for side in zip(*slots, strict=True)] or [[], []]
    assert list(scheduler.moves()) == expected
    following = scheduler.plan()
    assert following is not None
    assert list(following.moves) == expected
    assert scheduler.moves() == ([], [])
    scheduler.prefix.check()


def test_an_end_token_on_a_branch_cuts_its_path() -> None:
    scheduler = scheduler_of()
    submit(scheduler, stop_token_ids=(21,))
    prefilled(scheduler)
    plan = planned_tree(scheduler, DRAFTS, PARENTS)
    (output,) = scheduler.apply(plan, [[20, 21, 9]])
    assert (output.token_ids, output.finish_reason) == ([20, 21], FINISH_STOP)
    assert len(scheduler.moves()[0]) == 2


def test_of_a_tree_that_is_too_large_its_beginning_is_kept() -> None:
    scheduler = scheduler_of(max_batched_tokens=4)
    submit(scheduler, prompt=[1, 2])
    (sequence,) = prefilled(scheduler)
    assert planned_tree(scheduler, DRAFTS, PARENTS).trees == [(0, PARENTS[:3])]
    assert len(sequence.drafts) == 3


def test_a_tree_is_no_deeper_than_the_length_that_is_left() -> None:
    scheduler = scheduler_of()
    submit(scheduler, max_tokens=3)
    prefilled(scheduler)
    assert planned_tree(scheduler, DRAFTS, PARENTS).trees == [(0, PARENTS[:2])]


def test_a_preempted_or_aborted_sequence_forgets_its_drafts() -> None:
    scheduler = scheduler_of()
    submit(scheduler)
    (sequence,) = prefilled(scheduler)
    sequence.drafts = [10, 11]
    scheduler.abort("a")
    assert sequence.drafts == []


def test_penalties_count_accepted_drafts() -> None:
    scheduler = scheduler_of()
    submit(scheduler, frequency_penalty=0.5)
    (sequence,) = prefilled(scheduler)
    step(scheduler, {"a": [6, 7]}, [[6, 8]])
    assert sequence.output_counts == {6: 2, 8: 1}
