"""Answers of a server: exact ids, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from firstlight.base.errors import EngineError, FirstlightError, ResourceError, UnsupportedError
from firstlight.drafter.remote import RemoteEngine
from firstlight.engine.params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, seed=3)
Change = Callable[[dict[str, Any]], object]


def engine(change: Change = lambda choice: None, status: int = 200) -> RemoteEngine:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        asked = json.loads(request.content)
        assert (asked["model"], asked["temperature"], asked["seed"]) == ("tiny", 0.0, 3)
        assert asked["return_token_ids"] is True
        prompt = asked["prompt"]
        choice = {"token_ids": [sum(prompt), 1], "prompt_token_ids": prompt, "finish_reason": "length"}
        change(choice)
        return httpx.Response(status, json={"choices": [choice]})

    return RemoteEngine("http://server:8000/v1", 4, httpx.MockTransport(answer))


def test_answers_come_in_order_with_their_ids() -> None:
    heard: list[int] = []
    prompts = [[number, number] for number in range(9)]
    answers = engine().answer(prompts, PARAMS, heard.append)
    assert [answer.token_ids for answer in answers] == [[2 * number, 1] for number in range(9)]
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert sum(heard) == 9


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        (lambda c: c.pop("token_ids"), 200, UnsupportedError, "returns no token ids"),
        (lambda c: c.update(prompt_token_ids=[1]), 200, EngineError, "read another prompt"),
        (lambda c: None, 500, EngineError, "answered 500"),
        (lambda c: c.update(token_ids="x"), 200, EngineError, "no completion"),
    ],
)
def test_what_is_not_exact_is_refused(
    change: Change, status: int, kind: type[FirstlightError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        engine(change, status).answer([[4, 5]], PARAMS, lambda num: None)
    assert caught.value.hint


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(ResourceError, match="no answer from"):
        RemoteEngine("http://127.0.0.1:9", 1)
