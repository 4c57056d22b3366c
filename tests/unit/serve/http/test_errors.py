"""Every bad request: its status, its parameter, and a message that names the remedy."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.api_server import ApiServer, says
from support.byte_text import byte_text
from support.fake_engine import Script

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(says("ok"), max_body_bytes=20_000) as running:
        yield running


@pytest.fixture
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def expect_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["type"]
    assert error["code"]
    assert not re.search(r"(?<!\.)\.\.(?!\.)", error["message"]), "two full stops"
    return error


BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    # fields of a wrong type, or out of range
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages.0", "dictionary"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{}] * 4097}, "messages", "4097"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "must lie in"),
    ({"top_p": 0}, "top_p", "must lie in"),
    ({"top_p": 1.5}, "top_p", "must lie in"),
    ({"top_k": -2}, "top_k", "must lie in"),
    ({"min_p": 2}, "min_p", "must lie in"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must lie in"),
    ({"frequency_penalty": 3}, "frequency_penalty", "must lie in"),
    ({"presence_penalty": -3}, "presence_penalty", "must lie in"),
    ({"seed": 2**64}, "seed", "must lie in"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": "x" * 500}, "max_tokens", "…"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "one of them"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "above max_tokens"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 17}, "n", "at most 16"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "not supported"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "0 to 299"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "must lie in"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "0 to 299"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    # impossible stops
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "a" * 257}, "stop", "257 characters"),
    ({"stop": 5}, "stop", "5"),
    # messages the model cannot take
    ({"messages": [{"content": "x"}]}, "messages.0.role", "must be one of"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'robot'"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "the role 'tool'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "missing"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages.0.tool_call_id",
        "no place",
    ),
    ({"messages": [{**USER[0], "tool_calls": [{}]}]}, "messages.0.tool_calls", "'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "'type'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "only text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages.0.content.0.type",
        "'assistant'",
    ),
    ({"messages": [{"role": "user", "refusal": "x"}]}, "messages.0.content", "missing"),
    (
        {"messages": [*USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages.1.tool_calls",
        "no place",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "no such field"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages.0.name", "string"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "must be false",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set"),
    # parameters that would change the answer
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"functions": [{}]}, "functions", "as tools"),
    ({"thinking": {"type": "enabled"}}, "thinking", "no switch"),
    ({"response_format": {"type": "json_object"}}, "response_format", "structured output"),
    ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    ({"audio": {"voice": "x"}}, "audio", "only text"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "reasoning"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "log-probabilities of the prompt"),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    ({"best_of": 3}, "best_of", "use n"),
    ({"use_beam_search": True}, "use_beam_search", "beam search"),
    ({"chat_template": "x"}, "chat_template", "--chat-template"),
    ({"guided_json": {"a": 1}}, "guided_json", "structured output"),
    ({"frobnicate": 1}, "frobnicate", "not supported"),
    ({"not-a-name": 1}, "not-a-name", "not supported"),
]


@pytest.mark.parametrize(("change", "param", "message"), BAD_CHATS, ids=str)
def test_a_bad_chat_request(http: httpx.Client, change: dict[str, Any], param: str, message: str) -> None:
    error = expect_error(http.post(CHAT, json={"messages": USER, **change}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


OUT_OF_RANGE: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("n", "max_tokens", "max_completion_tokens")
        for value in (0, -1, 2**31, 2**70)
    ),
    *((name, value) for name in ("min_tokens", "top_logprobs") for value in (-1, 2**31, 2**70)),
    *(
        (name, sign * 2**power)
        for name in ("priority", "seed", "top_k")
        for sign in (-1, 1)
        for power in (63, 90)
    ),
    *((name, value) for name in ("temperature", "repetition_penalty") for value in (-1, 1e300, 2**70)),
    *((name, value) for name in ("top_p", "min_p") for value in (-0.5, 1.5, 2**70)),
    *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-3, 2.5, -(2**70))),
    *(("logit_bias", {"1": value}) for value in (-101, 1e300)),
    ("logit_bias", {str(2**70): 1}),
    ("stop_token_ids", [2**70]),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=str)
def test_a_number_out_of_range_is_a_wrong_value(http: httpx.Client, name: str, value: Any) -> None:
    body = {"messages": USER, "logprobs": True, name: value}
    error = expect_error(http.post(CHAT, json=body), 400)
    assert (error["param"], error["code"]) == (name, "invalid_value")


@pytest.mark.parametrize(
    ("name", "value"), [("n", 1.5), ("n", "1"), ("n", True), ("top_p", "1"), ("seed", [1]), ("stop", 5)]
)
def test_another_kind_of_value_is_a_wrong_type(http: httpx.Client, name: str, value: Any) -> None:
    error = expect_error(http.post(CHAT, json={"messages": USER, name: value}), 400)
    assert (error["param"], error["code"]) == (name, "invalid_type")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000])
def test_what_is_no_number_of_json_is_refused(http: httpx.Client, number: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {number}}}'
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert expect_error(response, 400)["code"] == "invalid_json"


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": [1, 300]}, "prompt", "0 to 299"),
    ({"prompt": [-1]}, "prompt", "0 to 299"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
    ({"prompt": {"a": 1}}, "prompt", "prompt"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", "of the prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo: true"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "above max_tokens (0)"),
    ({"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}, "echo", "of the prompt"),
    ({"prompt": "x" * 256, "max_tokens": 0, "echo": True}, "prompt", "256 tokens"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "fill in the middle"),
    ({"prompt": "a", "messages": USER}, "messages", "not supported"),
    ({}, "prompt", "missing"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS, ids=str)
def test_a_bad_completion_request(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    error = expect_error(http.post(COMPLETIONS, json=body), 400)
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert message in error["message"]


def test_an_over_long_prompt_names_both_numbers(http: httpx.Client) -> None:
    error = expect_error(http.post(COMPLETIONS, json={"prompt": "x" * 300}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "300 tokens" in error["message"]
    assert "256 tokens" in error["message"]
    error = expect_error(http.post(COMPLETIONS, json={"prompt": "x" * 200, "max_tokens": 100}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("200", "100", "300", "256", "to 56"))
    for name in ("max_tokens", "max_completion_tokens"):
        error = expect_error(http.post(CHAT, json={"messages": USER, name: 250}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    chat = {"messages": [{"role": "user", "content": "x" * 300}]}
    assert expect_error(http.post(CHAT, json=chat), 400)["param"] == "messages"


def test_a_hopelessly_long_prompt_is_refused_by_its_beginning(http: httpx.Client) -> None:
    error = expect_error(http.post(COMPLETIONS, json={"prompt": "x" * 10_000}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert all(number in error["message"] for number in ("4096 tokens", "10000 characters", "256 tokens"))
    # Below that, a text is judged by its tokens: these have nine characters each.
    assert http.post(COMPLETIONS, json={"prompt": "<|start|>" * 200}).status_code == 200
    error = expect_error(http.post(COMPLETIONS, json={"prompt": "<|start|>" * 300}), 400)
    assert "resulted in 300 tokens" in error["message"]


def test_what_is_not_http_is_answered_in_json(server: ApiServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"what is this?\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    error = expect_error(http.post(CHAT, json={"messages": USER, "model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]
    assert http.post(CHAT, json={"messages": USER, "model": "alias"}).json()["model"] == "alias"
    expect_error(http.get("/v1/models/other"), 404)
    expect_error(http.post("/v1/tokenize", json={"prompt": "x", "model": "no"}), 404)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"{", "cut short"),
        (b'{"messages": [}', "not valid JSON"),
        (b"{'messages': []}", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'"hi"', "JSON object"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply"),
        ("\ufeff{}".encode("utf-16"), "not UTF-8"),
    ],
)
def test_malformed_bodies(http: httpx.Client, body: bytes, message: str) -> None:
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    error = expect_error(response, 400)
    assert error["code"] == "invalid_json"
    assert message in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
def test_unsupported_media(http: httpx.Client, headers: dict[str, str]) -> None:
    error = expect_error(http.post(CHAT, content=b"{}", headers=headers), 415)
    assert error["code"] == "unsupported_media_type"


def test_media_that_mean_json(http: httpx.Client) -> None:
    for kind in ("application/json; charset=UTF-8", "application/vnd.api+json", "Application/JSON"):
        response = http.post(CHAT, content=b'{"messages": []}', headers={"content-type": kind})
        assert expect_error(response, 400)["param"] == "messages"


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * 20_000 + b'"}'
    headers = {"content-type": "application/json"}
    error = expect_error(http.post(COMPLETIONS, content=body, headers=headers), 413)
    assert "at most 20000 bytes" in error["message"]
    chunks = iter([body[:10_000], body[10_000:]])
    expect_error(http.post(COMPLETIONS, content=chunks, headers=headers), 413)


def test_paths_and_methods(http: httpx.Client) -> None:
    assert expect_error(http.get("/v2/models"), 404)["code"] == "not_found"
    assert "POST" in expect_error(http.get(CHAT), 405)["message"]
    assert expect_error(http.delete("/v1/models"), 405)["code"] == "method_not_allowed"
    expect_error(http.delete("/v1/requests/none"), 404)


def test_tokenize_wants_one_thing(http: httpx.Client) -> None:
    expect_error(http.post("/v1/tokenize", json={}), 400)
    expect_error(http.post("/v1/tokenize", json={"prompt": "x", "messages": USER}), 400)
    expect_error(http.post("/v1/detokenize", json={"tokens": [300]}), 400)
    expect_error(http.post("/v1/detokenize", json={"tokens": ["a"]}), 400)


@pytest.mark.parametrize("streams", [False, True])
def test_a_full_queue_is_429(streams: bool) -> None:
    script = says("x", reject="queue full: 8 requests wait, the limit is 8")
    with ApiServer(script) as server, server.http() as http:
        response = http.post(CHAT, json={"messages": USER, "stream": streams, "n": 2})
        error = expect_error(response, 429)
        assert response.headers["retry-after"] == "1"
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")


def test_another_refusal_of_the_engine_is_400() -> None:
    with ApiServer(lambda _: Script(reject="the prompt is empty")) as server, server.http() as http:
        error = expect_error(http.post(CHAT, json={"messages": USER}), 400)
        assert "the prompt is empty" in error["message"]


def test_a_template_refuses_with_400_and_fails_with_500() -> None:
    template = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "{{ 'ok' if messages[0].content != 'break' else 1 + 'x' }}"
    )
    with ApiServer(text=byte_text(template)) as server, server.http() as http:
        assert http.post(CHAT, json={"messages": USER}).status_code == 200
        error = expect_error(http.post(CHAT, json={"messages": USER * 2}), 400)
        assert (error["param"], error["code"]) == ("messages", "invalid_messages")
        assert "refused the messages: one message only. Check" in error["message"]
        broken = [{"role": "user", "content": "break"}]
        for path in (CHAT, "/v1/tokenize"):
            error = expect_error(http.post(path, json={"messages": broken}), 500)
            assert (error["param"], error["code"]) == (None, "chat_template_failed")
            assert "fault of the template" in error["message"]


def test_a_bug_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with ApiServer(lambda _: Script([10**6], 257)) as server, server.http() as http:
        server.client.open = None  # type: ignore[assignment]
        for body in ({"messages": USER}, {"messages": USER, "stream": True}):
            error = expect_error(http.post(CHAT, json=body), 500)
            assert error["code"] == "internal_error"
            assert "Traceback" not in error["message"]
            assert error["message"].split()[2].rstrip(";") in caplog.text


def test_a_bug_outside_of_generation_is_a_500_too(caplog: pytest.LogCaptureFixture) -> None:
    with ApiServer() as server, server.http() as http:
        server.metrics.scrape = None  # type: ignore[assignment]
        expect_error(http.get("/metrics"), 500)
