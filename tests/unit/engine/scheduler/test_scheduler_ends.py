"""How requests end: reasons, limits, rejections, aborts in every state, and any random workload."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.engine.scheduler.sequence import NO_TOKEN, Sequence
from support.schedules import END, PLAIN, Driver, request


def end_after(num: int, token: int = END):
    return lambda sequence: token if sequence.num_output == num else PLAIN


def test_an_end_token_stops_and_is_named() -> None:
    driver = Driver(choose=end_after(2))
    driver.submit(request("a", 4))
    driver.run()
    end = driver.ended["a"]
    assert (end.finish_reason, end.stop_token_id) == ("stop", END)
    assert driver.tokens("a") == [PLAIN, PLAIN, END]


def test_ignore_eos_goes_on_to_the_limit() -> None:
    driver = Driver(choose=end_after(2))
    driver.submit(request("a", 4, ignore_eos=True, max_tokens=5))
    driver.run()
    assert (driver.ended["a"].finish_reason, driver.ended["a"].stop_token_id) == ("length", None)
    assert driver.tokens("a") == [PLAIN, PLAIN, END, PLAIN, PLAIN]


def test_the_request_s_own_stop_tokens_end_it_even_with_ignore_eos() -> None:
    driver = Driver(choose=end_after(1, token=42))
    driver.submit(request("a", 4, ignore_eos=True, stop_token_ids=(41, 42)))
    driver.submit(request("b", 5, max_tokens=3))
    driver.run()
    assert (driver.ended["a"].finish_reason, driver.ended["a"].stop_token_id) == ("stop", 42)
    assert driver.ended["b"].finish_reason == "length"


def test_an_end_token_on_the_last_allowed_place_is_a_stop() -> None:
    driver = Driver(choose=end_after(2))
    driver.submit(request("a", 4, max_tokens=3))
    driver.run()
    assert driver.ended["a"].finish_reason == "stop"


def test_without_max_tokens_the_model_s_length_is_the_limit() -> None:
    driver = Driver(max_model_len=20)
    driver.submit(request("a", 12), request("b", 12, max_tokens=100))
    driver.run()
    assert [len(driver.tokens(name)) for name in "ab"] == [8, 8]
    assert driver.ended["a"].finish_reason == "length"


def test_logits_that_are_not_numbers_end_their_own_sequence_with_an_error() -> None:
    def choose(sequence: Sequence) -> int:
        return NO_TOKEN if sequence.request_id == "bad" and sequence.num_output == 1 else PLAIN

    driver = Driver(choose=choose)
    driver.submit(request("bad", 4, max_tokens=4), request("good", 4, max_tokens=4))
    driver.run()
    bad = driver.ended["bad"]
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error is not None
    assert "not numbers" in bad.error
    assert driver.tokens("bad") == [PLAIN]
    assert len(driver.tokens("good")) == 4


REJECTED = {
    "empty": ([], "the prompt is empty"),
    "too long": (range(64), "the prompt has 64 tokens, but this server takes at most 63"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejections_say_why(name: str) -> None:
    prompt, reason = REJECTED[name]
    driver = Driver(max_model_len=64)
    driver.submit(request("a", prompt))
    assert driver.ended["a"].finish_reason == "rejected"
    assert reason in (driver.ended["a"].error or "")
    assert not driver.scheduler.has_work


def test_the_longest_prompt_that_fits_gives_one_token() -> None:
    driver = Driver(max_model_len=64)
    driver.submit(request("a", 63))
    driver.run()
    assert driver.tokens("a") == [PLAIN]


def test_a_full_queue_rejects_and_running_requests_do_not_count() -> None:
    driver = Driver(max_num_seqs=1, max_queue=2)
    driver.submit(request("running", 4, max_tokens=9))
    driver.step()
    driver.submit(*(request(name, 4, max_tokens=1) for name in ("w1", "w2", "w3")))
    assert driver.ended.keys() == {"w3"}
    assert "queue full: 2 requests wait, the limit is 2" in (driver.ended["w3"].error or "")
    driver.run()


def test_an_id_in_use_is_rejected_without_harm_to_the_first() -> None:
    driver = Driver()
    driver.submit(request("a", 4, max_tokens=3))
    driver.step()
    driver.scheduler.submit(request("a", 4))
    (rejected,) = driver.scheduler.take_finished()
    assert rejected.finish_reason == "rejected"
    assert "already in use" in (rejected.error or "")
    driver.run()
    assert len(driver.tokens("a")) == 3


def test_an_id_may_be_used_again_after_its_end() -> None:
    driver = Driver()
    for _ in range(2):
        driver.submit(request("a", 4, max_tokens=2))
        driver.run()
        assert driver.ended.pop("a").finish_reason == "length"


ABORT_AFTER = {"waiting": 0, "first chunk": 1, "second chunk": 2, "last chunk": 3, "decoding": 5}


@pytest.mark.parametrize("state", ABORT_AFTER)
def test_abort_frees_the_pages_before_the_next_step(state: str) -> None:
    driver = Driver(max_batched_tokens=32)
    driver.submit(request("a", 70, max_tokens=20))
    for _ in range(ABORT_AFTER[state]):
        driver.step()
    driver.abort("a")
    assert driver.ended["a"].finish_reason == "abort"
    assert driver.step() == {}
    driver.check_empty()


def test_abort_of_a_preempted_sequence() -> None:
    driver = Driver(pages=8, max_model_len=32)
    driver.submit(request("a", 8, max_tokens=20), request("b", 8, max_tokens=20))
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    driver.abort("b")
    driver.run()
    assert driver.ended["b"].finish_reason == "abort"
    assert len(driver.tokens("a")) == 20


def test_abort_of_an_unknown_or_ended_request_is_nothing() -> None:
    driver = Driver()
    driver.abort("nobody")
    driver.submit(request("a", 4, max_tokens=1))
    driver.run()
    driver.abort("a")
    assert driver.ended["a"].finish_reason == "length"


def test_abort_all_ends_running_and_waiting_ones() -> None:
    driver = Driver(max_num_seqs=1)
    driver.submit(request("a", 4), request("b", 4))
    driver.step()
    driver.scheduler.abort_all()
    assert {o.request_id: o.finish_reason for o in driver.scheduler.take_finished()} == {
        "a": "abort",
        "b": "abort",
    }
    assert not driver.scheduler.has_work
    driver.check_empty()


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 24), st.integers(-1, 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 40)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=ACTIONS,
    pages=st.integers(10, 24),
    budget=st.integers(4, 40),
    cache=st.booleans(),
    ends=st.integers(0, 12),
)
def test_any_workload_ends_once_and_gives_every_page_back(actions, pages, budget, cache, ends) -> None:
    """`Driver` checks every plan: the budget, the pages, the tables that the ranks see."""

    def choose(sequence: Sequence) -> int:
        return END if (sequence.num_prompt + sequence.num_output) % 13 == ends else sequence.num_output % 2

    driver = Driver(
        pages=pages, choose=choose, max_num_seqs=4, max_batched_tokens=budget, max_model_len=40,
        prefix_cache=cache, max_queue=6,
    )  # fmt: skip
    submitted: list[str] = []
    for action in actions:
        if action[0] == "submit":
            submitted.append(f"r{len(submitted)}")
            driver.submit(request(submitted[-1], action[1], action[3], max_tokens=action[2]))
        elif action[0] == "step":
            for _ in range(action[1]):
                driver.step()
        elif submitted:
            driver.abort(submitted[action[1] % len(submitted)])
    driver.run()
    assert driver.ended.keys() == set(submitted)
    for name, end in driver.ended.items():
        if end.finish_reason in ("stop", "length"):
            assert driver.tokens(name), f"{name} ended without a token"


@pytest.mark.parametrize("seed", range(6))
def test_a_long_mixed_load_with_few_pages(seed: int) -> None:
    chance = random.Random(seed)
    pages = chance.randrange(14, 40)
    driver = Driver(
        pages=pages, max_num_seqs=6, max_batched_tokens=chance.choice((6, 16, 64)), max_model_len=48,
        max_queue=1000, choose=lambda s: END if (s.arrival + s.num_output) % 29 == 0 else s.num_output % 3,
    )  # fmt: skip
    names = [f"r{number}" for number in range(150)]
    for name in names:
        prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 40))]
        params = {"max_tokens": chance.randrange(1, 30), "min_tokens": 0}
        driver.submit(request(name, prompt, chance.choice((0, 0, 0, -1, 1)), **params))
        for _ in range(chance.randrange(3)):
            driver.step()
        if chance.random() < 0.1:
            driver.abort(chance.choice(names))
    driver.run(max_steps=20_000)
    assert driver.ended.keys() == set(names)
    assert driver.scheduler.stats().num_preemptions > 0
    assert driver.scheduler.stats().cache_hit_tokens > 0
