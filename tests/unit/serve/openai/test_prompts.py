"""Prompts that do not fit: in whose words, and what is not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from firstlight.base.config import EngineSection
from support.api_server import ApiServer, says

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with ApiServer(says("ok")) as server, server.http() as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_length_errors_are_in_the_words_that_frameworks_know(http: httpx.Client) -> None:
    """LiteLLM looks for the beginning, LangChain for the code; both cut the conversation then."""
    begins = "This model's maximum context length is 256 tokens. However, "
    long = [{"role": "user", "content": "x" * 300}]
    for path, body, more in (
        (COMPLETIONS, {"prompt": "x" * 300}, "your prompt resulted in 300 tokens"),
        (COMPLETIONS, {"prompt": "x" * 10_000}, "your prompt resulted in far more than 4096 tokens"),
        (
            COMPLETIONS,
            {"prompt": "x" * 200, "max_tokens": 100},
            "you requested 300 tokens (200 in the prompt, 100 in the completion). Please reduce the length",
        ),
        (CHAT, {"messages": long}, "your messages resulted in 3"),
        (CHAT, {"messages": USER, "max_tokens": 250}, "in the messages, 250 in the completion)"),
    ):
        error = error_of(http.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(begins)
        assert error["message"].endswith("(context_length_exceeded).")
        assert more in error["message"]


def test_more_answers_than_can_ever_wait_are_refused_with_the_limit() -> None:
    with ApiServer(says("ok"), engine=EngineSection(max_queue=4)) as server, server.http() as http:
        error = error_of(http.post(COMPLETIONS, json={"prompt": ["a"] * 3, "n": 2}))
        assert error["param"] == "n"
        assert all(text in error["message"] for text in ("6 answers", "at most 4", "--max-queue"))
        assert error_of(http.post(COMPLETIONS, json={"prompt": ["a"] * 5}))["param"] == "prompt"
        assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).status_code == 200


def test_a_completion_near_the_limit_asks_for_no_tokens_that_nobody_asked_for(http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "x" * 250}).status_code == 200
    message = error_of(http.post(COMPLETIONS, json={"prompt": "x" * 256}))["message"]
    assert "16" not in message.replace("256", "")
    assert http.post(COMPLETIONS, json={"prompt": "x", "min_tokens": 20}).status_code == 200


def test_a_text_whose_tokens_the_model_does_not_know_ends_no_engine() -> None:
    """Tokens were added to the tokenizer, and the model was not resized for them."""
    server = ApiServer(says("ok"))
    server.engine.sizes = (256, 80)
    with server, server.http() as http:
        for path, body, param in (
            (COMPLETIONS, {"prompt": "zzz"}, "prompt"),
            (COMPLETIONS, {"prompt": [[1, 80]]}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": "zzz"}]}, "messages"),
        ):
            error = error_of(http.post(path, json=body))
            assert error["param"] == param
            assert "the model knows 0 to 79" in error["message"]
