"""Requests that arrive together and share a prefix: it is computed once, and nobody else waits for it."""

from __future__ import annotations

from support.schedules import PAGE, Driver, request

PROMPT = list(range(200, 221))  # five full pages and one token


def test_equal_prompts_that_arrive_together_compute_their_prefix_once() -> None:
    driver = Driver()
    driver.submit(*(request(f"choice-{i}", PROMPT, max_tokens=3) for i in range(4)))
    assert driver.step() == {"choice-0": 21}
    # What the others compute themselves is the last token: its logits are needed.
    assert driver.step() == {"choice-0": 1, "choice-1": 1, "choice-2": 1, "choice-3": 1}
    driver.run()
    assert [driver.outputs[f"choice-{i}"][0].num_cached_tokens for i in range(4)] == [0, 20, 20, 20]


def test_a_prefix_in_chunks_is_waited_for_to_its_end() -> None:
    driver = Driver(max_batched_tokens=8)
    driver.submit(request("first", PROMPT, max_tokens=1), request("second", [*PROMPT, 1, 2], max_tokens=1))
    history = driver.run()
    assert sum(ran.get("first", 0) for ran in history) == 21
    assert sum(ran.get("second", 0) for ran in history) == 3


def test_an_unrelated_request_passes_the_one_that_waits_for_a_prefix() -> None:
    driver = Driver(max_batched_tokens=64)
    long_prompt = range(300, 400)
    driver.submit(
        request("first", long_prompt, max_tokens=1),
        request("second", long_prompt, max_tokens=1),
        request("other", 3, max_tokens=1),
    )
    ran = driver.step()
    assert "second" not in ran
    assert ran["other"] == 3


def test_when_the_first_is_aborted_the_second_computes_the_prefix() -> None:
    driver = Driver(max_batched_tokens=8)
    driver.submit(request("first", PROMPT), request("second", PROMPT, max_tokens=1))
    driver.step()
    driver.abort("first")
    driver.run()
    assert driver.ended["second"].finish_reason == "length"


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    driver = Driver(prefix_cache=False, max_batched_tokens=64)
    driver.submit(request("first", PROMPT, max_tokens=1), request("second", PROMPT, max_tokens=1))
    assert driver.step() == {"first": 21, "second": 21}


def test_pages_that_running_prompts_still_need_are_not_given_to_a_newcomer() -> None:
    # 12 pages: the first needs 8 and has 2 after its first chunk; 6 free ones are spoken for.
    driver = Driver(pages=12, max_batched_tokens=8, max_model_len=48)
    driver.submit(request("long", 8 * PAGE, max_tokens=1))
    driver.step()
    driver.submit(request("newcomer", 5 * PAGE, max_tokens=1))
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.stats().num_preemptions == 0
    driver.check_empty()


def test_prompts_of_one_prefix_run_together_while_it_is_cached() -> None:
    """Four families of prompts take turns arriving, and the pool holds the prefixes of two at most."""
    driver = Driver(pages=16, max_model_len=64, max_num_seqs=1, max_batched_tokens=64)
    families = {name: range(100 * place, 100 * place + 7 * PAGE) for place, name in enumerate("abcd", 1)}
    for turn in range(3):
        driver.submit(*(request(f"{name}{turn}", families[name], max_tokens=1) for name in families))
    order = [name for step in driver.run() for name in step]
    assert [name[0] for name in order] == [*"aaabbbcccddd"]
    hits = driver.scheduler.stats().cache_hit_tokens
    assert hits == 8 * 6 * PAGE  # all but the first of each family
