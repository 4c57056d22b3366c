"""WaitingQueue: order, removal, and that removed entries do not pile up."""

from __future__ import annotations

import random

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.scheduler.waiting_queue import MAX_PASSED_OVER, WINDOW, WaitingQueue


def sequence(name: str, arrival: int, priority: int = 0) -> Sequence:
    submit = Submit(name, [1], SamplingParams(seed=0), priority)
    return Sequence(submit, arrival, frozenset(), 16)


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while len(queue):
        names.append(queue.pop().request_id)
    return names


def test_lower_priority_values_go_first_then_earlier_arrivals() -> None:
    queue = WaitingQueue()
    for item in (sequence("c", 2), sequence("a", 0), sequence("urgent", 3, -1), sequence("b", 1)):
        queue.push(item)
    sequence_ = queue.peek()
    assert sequence_ is not None
    assert sequence_.request_id == "urgent"
    assert drain(queue) == ["urgent", "a", "b", "c"]
    assert queue.peek() is None


def test_a_removed_one_is_never_taken() -> None:
    queue = WaitingQueue()
    for arrival, name in enumerate("abc"):
        queue.push(sequence(name, arrival))
    removed = queue.remove("a")
    assert removed is not None
    assert removed.request_id == "a"
    assert queue.remove("a") is None
    assert len(queue) == 2
    assert drain(queue) == ["b", "c"]


def test_a_name_may_come_back_after_it_was_removed() -> None:
    queue = WaitingQueue()
    queue.push(sequence("a", 0))
    queue.remove("a")
    queue.push(sequence("b", 1))
    queue.push(sequence("a", 2))
    assert drain(queue) == ["b", "a"]


def test_submitting_and_aborting_behind_a_blocked_head_does_not_make_it_grow() -> None:
    queue = WaitingQueue()
    queue.push(sequence("head", 0))
    for arrival in range(1, 5000):
        queue.push(sequence(f"r{arrival}", arrival))
        queue.remove(f"r{arrival}")
    assert len(queue) == 1
    assert len(queue._heap) < 200


def test_any_mix_of_pushes_and_removals_keeps_the_order() -> None:
    chance = random.Random(3)
    queue, waiting = WaitingQueue(), {}
    for arrival in range(500):
        item = sequence(f"r{arrival}", arrival, chance.randrange(3))
        queue.push(item)
        waiting[item.request_id] = item
        if chance.random() < 0.4:
            name = chance.choice(list(waiting))
            assert queue.remove(name) is waiting.pop(name)
        assert len(queue) == len(waiting)
    assert drain(queue) == [s.request_id for s in sorted(waiting.values(), key=lambda s: s.order)]


def test_of_one_priority_the_best_cached_goes_first_and_ties_keep_their_order() -> None:
    queue = WaitingQueue()
    for arrival, name in enumerate("abcd"):
        queue.push(sequence(name, arrival, priority=0 if name != "d" else 1))
    cached = {"a": 1, "b": 3, "c": 3, "d": 9}
    order = []
    while len(queue):
        order.append(queue.pop(lambda item: cached[item.request_id]).request_id)
    assert order == ["b", "c", "a", "d"]


def test_nobody_is_passed_over_more_than_a_few_times() -> None:
    queue = WaitingQueue()
    queue.push(sequence("uncached", 0))
    taken = []
    for arrival in range(1, 20):
        queue.push(sequence(f"cached-{arrival}", arrival))
        taken.append(queue.pop(lambda item: item.request_id.startswith("cached")).request_id)
    assert taken.index("uncached") == MAX_PASSED_OVER


def test_the_look_for_a_cached_prompt_goes_only_so_far() -> None:
    queue = WaitingQueue()
    asked: list[str] = []
    for arrival in range(100):
        queue.push(sequence(f"r{arrival}", arrival))

    def num_cached(item: Sequence) -> int:
        asked.append(item.request_id)
        return 0

    assert queue.pop(num_cached).request_id == "r0"
    assert len(asked) == WINDOW
    assert drain(queue) == [f"r{arrival}" for arrival in range(1, 100)]
