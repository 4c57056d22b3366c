"""Completions: texts and token ids, one prompt and many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from firstlight.engine.messages import Submit
from support.api_server import ApiServer
from support.byte_text import END, byte_text, tokens
from support.fake_engine import Script


def script(submit: Submit) -> Script:
    """Says the prompt again, twice."""
    return Script(submit.prompt_token_ids * 2, END, num_cached=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(script) as running:
        yield running


def ask(server: ApiServer, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        response = http.post("/v1/completions", json={"max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: ApiServer, **body: Any) -> list[dict[str, Any]]:
    with server.http() as http:
        response = http.post("/v1/completions", json={"max_tokens": 100, "stream": True, **body})
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], response.text
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_an_answer_has_the_shape_of_openais(server: ApiServer) -> None:
    answer = ask(server, prompt="ab")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "abab", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_prompts_as_texts_ids_and_batches(server: ApiServer) -> None:
    assert texts(ask(server, prompt=tokens("x"))) == ["xx"]
    assert texts(ask(server, prompt=["x", "yz"])) == ["xx", "yzyz"]
    assert texts(ask(server, prompt=[tokens("x"), tokens("yz")])) == ["xx", "yzyz"]
    assert texts(ask(server, prompt=[""" a """])) == [" a  a "]


def test_a_batch_counts_every_prompt_once(server: ApiServer) -> None:
    answer = ask(server, prompt=["x", "yz"], n=2)
    assert texts(answer) == ["xx", "xx", "yzyz", "yzyz"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * (2 + 4) + 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_sixteen_tokens_by_default(server: ApiServer) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "0123456789"}).json()
    assert texts(answer) == ["0123456789012345"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_echo_puts_the_prompt_first(server: ApiServer) -> None:
    assert texts(ask(server, prompt="ab", echo=True)) == ["ababab"]
    assert texts(ask(server, prompt=tokens("ab"), echo=True)) == ["ababab"]
    assert texts(ask(server, prompt=["x", "y"], echo=True)) == ["xxx", "yyy"]
    assert texts(ask(server, prompt=[tokens("x"), tokens("y")], echo=True)) == ["xxx", "yyy"]
    assert texts(ask(server, prompt=[120], echo=True)) == ["xxx"]


def test_the_echo_alone_needs_no_engine(server: ApiServer) -> None:
    before = len(server.engine.received(Submit))
    answer = ask(server, prompt=["ab", "é"], echo=True, max_tokens=0, n=2, return_token_ids=True)
    assert texts(answer) == ["ab", "ab", "é", "é"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["choices"][3]["prompt_token_ids"] == tokens("é")
    assert answer["choices"][3]["token_ids"] == []
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 0, 4)
    events = stream(
        server, prompt=["ab", "é"], echo=True, max_tokens=0, n=2, stream_options={"include_usage": True}
    )
    assert [choice["text"] for event in events for choice in event["choices"]] == texts(answer)
    assert [event["usage"] for event in events] == [None] * 4 + [usage]
    assert len(server.engine.received(Submit)) == before


def test_a_stream_joined_is_the_whole_answer(server: ApiServer) -> None:
    events = stream(server, prompt=["ab", "é"], echo=True, n=2, stream_options={"include_usage": True})
    joined = [""] * 4
    for event in events[:-1]:
        (choice,) = event["choices"]
        joined[choice["index"]] += choice["text"]
    assert joined == ["ababab", "ababab", "ééé", "ééé"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens"] == 4


def test_logprobs_are_parallel_lists(server: ApiServer) -> None:
    logprobs = ask(server, prompt="ab", logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "tokens": ["a", "b", "a"],
        "top_logprobs": [{"b": -1.0, "a": -0.5}, {"c": -1.0, "b": -0.5}, {"b": -1.0, "a": -0.5}],
    }


def test_tokens_that_are_a_part_of_a_character_keep_apart(server: ApiServer) -> None:
    """The fake engine names the next token id as second likeliest: two of them must not share one key."""
    logprobs = ask(server, prompt="é", logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs["top_logprobs"] == [
        {r"bytes:\xc4": -1.0, r"bytes:\xc3": -0.5},
        {r"bytes:\xaa": -1.0, r"bytes:\xa9": -0.5},
    ]


def test_the_sampled_token_is_always_among_the_top_ones(server: ApiServer) -> None:
    logprobs = ask(server, prompt="ab", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]


def test_streamed_logprobs_are_the_same_ones(server: ApiServer) -> None:
    whole = ask(server, prompt="é!", logprobs=1)["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for event in stream(server, prompt="é!", logprobs=1):
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole


def test_token_ids_beside_the_text(server: ApiServer) -> None:
    (choice,) = ask(server, prompt="ab", return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == tokens("ab")
    assert choice["token_ids"] == [*tokens("abab"), END]
    events = stream(server, prompt="ab", return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == tokens("ab")
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    assert [t for event in events for t in event["choices"][0]["token_ids"]] == [*tokens("abab"), END]


def test_a_long_prompt_is_tokenised_beside_the_loop() -> None:
    long_text = "x" * 200
    with ApiServer(script) as server:
        from firstlight.serve.openai import prompts

        limit, prompts.INLINE_CHARS = prompts.INLINE_CHARS, 10
        try:
            assert ask(server, prompt=long_text, max_tokens=1)["usage"]["prompt_tokens"] == 200
            with server.http() as http:
                messages = [{"role": "user", "content": long_text}]
                answer = http.post("/v1/tokenize", json={"messages": messages}).json()
            assert answer["count"] > 200
        finally:
            prompts.INLINE_CHARS = limit


def test_tokenize_has_vllms_paths_and_shapes_too(server: ApiServer) -> None:
    with server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "hi"}).json()
        ids = answer["tokens"]
        assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
        assert answer == http.post("/v1/tokenize", json={"prompt": "hi"}).json()
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hi"}
        info = http.get("/tokenizer_info").json()
        assert (info["tokenizer_class"], info["model_max_length"]) == ("PreTrainedTokenizerFast", 256)
        assert "add_generation_prompt" in info["chat_template"]


def test_tokenize_and_back(server: ApiServer) -> None:
    with server.http() as http:
        answer = http.post("/v1/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
        assert answer == {
            "count": 3,
            "max_model_len": 256,
            "tokens": tokens("hé"),
            "token_strs": ["h", r"\xc3", r"\xa9"],
        }
        chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
        ids = http.post("/v1/tokenize", json=chat).json()["tokens"]
        assert byte_text().decode(ids, skip_special_tokens=False) == "<|start|>user\nHi<|end|>\n"
        assert http.post("/v1/detokenize", json={"tokens": ids}).json() == {
            "prompt": "<|start|>user\nHi<|end|>\n"
        }
        shorter = http.post("/v1/detokenize", json={"tokens": ids, "skip_special_tokens": True})
        assert shorter.json() == {"prompt": "user\nHi\n"}
