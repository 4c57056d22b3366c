"""The scheduler as named histories: budgets, fairness, priorities, preemption, admission, the cache."""

from __future__ import annotations

import pytest

from firstlight.base.config import EngineSection
from firstlight.engine.scheduler.scheduler import MIN_CHUNK_TOKENS, Scheduler
from support.schedules import PAGE, PLAIN, Driver, request


def test_a_prompt_longer_than_the_budget_runs_in_chunks() -> None:
    driver = Driver(max_batched_tokens=32)
    driver.submit(request("a", 70, max_tokens=2))
    assert driver.run() == [{"a": 32}, {"a": 32}, {"a": 6}, {"a": 1}]
    assert driver.tokens("a") == [PLAIN, PLAIN]


def test_a_running_answer_gets_its_token_in_every_step_of_a_long_prompt() -> None:
    driver = Driver(max_batched_tokens=32)
    driver.submit(request("answer", 4, max_tokens=20))
    driver.step()
    driver.submit(request("long", 120, max_tokens=1))
    steps = [driver.step() for _ in range(4)]
    assert steps == [{"answer": 1, "long": 31}] * 3 + [{"answer": 1, "long": 27}]
    driver.run()


def test_prompts_share_the_budget_instead_of_queueing_behind_the_longest() -> None:
    driver = Driver(max_batched_tokens=64, pages=100)
    driver.submit(request("long", 120, max_tokens=1), request("short", 20, max_tokens=1))
    first = driver.step()
    assert first == {"long": MIN_CHUNK_TOKENS, "short": 20}
    assert "short" in driver.ended
    driver.run()


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    driver = Driver(max_batched_tokens=64)
    driver.submit(request("long", 120, max_tokens=1))
    assert driver.run() == [{"long": 64}, {"long": 56}]


def test_many_prompts_advance_in_every_step() -> None:
    driver = Driver(max_batched_tokens=128, max_num_seqs=4, pages=200)
    for name in "abcd":
        driver.submit(request(name, 100, max_tokens=1))
    seen: set[str] = set()
    for _ in range(3):
        seen |= driver.step().keys()
    assert seen == set("abcd")
    driver.run()


def test_arrivals_of_equal_priority_start_in_their_order() -> None:
    driver = Driver(max_num_seqs=2)
    for name in "abcd":
        driver.submit(request(name, 4, max_tokens=3))
    assert list(driver.step()) == ["a", "b"]
    history = driver.run()
    assert [list(step) for step in history if "c" in step][0] == ["c", "d"]


def test_a_lower_priority_value_starts_first() -> None:
    driver = Driver(max_num_seqs=1)
    driver.submit(request("late", 4, 5, max_tokens=1), request("normal", 4, max_tokens=1))
    driver.submit(request("urgent", 4, -5, max_tokens=1))
    assert [list(step) for step in driver.run()] == [["urgent"], ["normal"], ["late"]]


def test_no_more_sequences_run_than_there_are_slots() -> None:
    driver = Driver(max_num_seqs=3, pages=100)
    for number in range(10):
        driver.submit(request(f"r{number}", 5, max_tokens=4))
    assert max(len(step) for step in driver.run()) == 3
    assert len(driver.ended) == 10


def test_what_cannot_hold_its_prompt_is_not_admitted() -> None:
    driver = Driver(pages=12, max_model_len=48)
    driver.submit(request("first", 30, max_tokens=3))  # 8 pages
    driver.step()
    driver.submit(request("second", 20, max_tokens=3))  # 5 pages, 4 are free
    assert driver.step() == {"first": 1}
    assert driver.scheduler.stats().num_waiting == 1
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    assert driver.ended["second"].finish_reason == "length"


def test_a_smaller_request_does_not_overtake_a_blocked_head() -> None:
    driver = Driver(pages=12, max_model_len=48)
    driver.submit(request("first", 30, max_tokens=3))
    driver.step()
    driver.submit(request("big", 40, max_tokens=1), request("small", 2, max_tokens=1))
    assert list(driver.step()) == ["first"]
    driver.run()


def test_when_pages_run_out_the_last_in_order_gives_way_and_returns() -> None:
    driver = Driver(pages=8, max_model_len=32, choose=lambda s: s.num_output)
    driver.submit(request("a", 8, max_tokens=20), request("b", 8, max_tokens=20))
    preempted_at = None
    for step in range(40):
        driver.step()
        if preempted_at is None and driver.scheduler.stats().num_preemptions:
            preempted_at = step
            assert driver.running() == ["a"]
            assert driver.scheduler.stats().num_waiting == 1
    driver.run()
    assert preempted_at is not None
    # Nothing was lost, said twice, or in another order.
    assert driver.tokens("a") == driver.tokens("b") == list(range(20))


def test_a_better_priority_makes_a_worse_one_give_way_even_if_it_came_earlier() -> None:
    driver = Driver(pages=8, max_model_len=32)
    driver.submit(request("old", 8, 1, max_tokens=16))
    driver.step()
    driver.submit(request("urgent", 8, 0, max_tokens=16))
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    assert driver.running() == ["urgent"]
    driver.run()
    assert list(driver.ended) == ["urgent", "old"]


def test_what_was_preempted_does_not_come_back_in_the_same_step() -> None:
    driver = Driver(pages=8, max_model_len=32)
    driver.submit(request("a", 8, max_tokens=20), request("b", 8, max_tokens=20))
    while driver.scheduler.stats().num_preemptions == 0:
        ran = driver.step()
    assert list(ran) == ["a"]
    driver.run()


def test_a_preempted_sequence_finds_its_own_pages_and_no_hit_is_counted() -> None:
    driver = Driver(pages=8, max_model_len=32)
    driver.submit(request("a", 8, max_tokens=20), request("b", 8, max_tokens=20))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.cache_query_tokens, stats.cache_hit_tokens) == (16, 0)
    assert driver.ended["b"].num_cached_tokens == 0


def test_a_second_prompt_takes_its_full_pages_from_the_cache() -> None:
    driver = Driver()
    shared = list(range(1, 15))
    driver.submit(request("a", shared, max_tokens=1))
    driver.step()
    driver.submit(request("b", [*shared, 50, 51], max_tokens=1))
    assert driver.step() == {"b": 16 - 12}
    assert driver.ended["b"].num_cached_tokens == 12
    stats = driver.scheduler.stats()
    assert (stats.cache_query_tokens, stats.cache_hit_tokens) == (14 + 16, 12)


def test_the_last_prompt_token_is_always_computed() -> None:
    driver = Driver()
    prompt = list(range(1, 2 * PAGE + 1))
    for name in "ab":
        driver.submit(request(name, prompt, max_tokens=1))
        driver.step()
    assert driver.ended["b"].num_cached_tokens == PAGE


def test_answers_are_in_the_cache_for_the_next_turn() -> None:
    driver = Driver()
    driver.submit(request("a", [1, 2, 3, 4], max_tokens=9))
    while driver.scheduler.has_work:
        driver.step()
    driver.submit(request("b", [1, 2, 3, 4, *[PLAIN] * 9, 5], max_tokens=1))
    driver.step()
    assert driver.ended["b"].num_cached_tokens == 12


def test_without_a_prefix_cache_nothing_is_found_and_nothing_stays() -> None:
    driver = Driver(prefix_cache=False)
    for name in "ab":
        driver.submit(request(name, range(1, 20), max_tokens=1))
        driver.step()
    assert driver.ended["b"].num_cached_tokens == 0
    assert driver.scheduler.stats().pages_cached == 0


def test_cached_pages_give_way_to_running_sequences() -> None:
    driver = Driver(pages=10, max_model_len=40)
    for name in "abcdef":
        driver.submit(request(name, 24, max_tokens=2))
        while driver.scheduler.has_work:
            driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.check_empty()


def test_one_token_a_running_sequence_must_fit_the_budget() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        Scheduler(EngineSection(max_num_seqs=64, max_batched_tokens=32, max_model_len=64), 10, [])


def test_the_pool_must_hold_the_longest_sequence() -> None:
    section = EngineSection(max_num_seqs=4, max_batched_tokens=32, max_model_len=64, page_size_tokens=16)
    Scheduler(section, 5, [])
    with pytest.raises(ValueError, match="max_model_len"):
        Scheduler(section, 4, [])  # three pages beside the null page: one sequence would wait for ever


def test_a_full_house_decodes_with_exactly_its_budget() -> None:
    driver = Driver(max_num_seqs=8, max_batched_tokens=8, pages=64)
    for number in range(9):
        driver.submit(request(f"r{number}", 1, max_tokens=6))
    history = driver.run()
    assert max(sum(step.values()) for step in history) == 8
    assert len(driver.ended) == 9
