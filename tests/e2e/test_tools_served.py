"""A Kimi-shaped model that writes its family's markup, served: thinking and tool calls, also streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.planted import write_planted_kimi
from support.serving import RunningServer

pytestmark = pytest.mark.timeout(300)
USER = {"role": "user", "content": "Go."}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}]
SCRIPT = (
    "<think>Hm</think>Ok!<|tool_calls_section_begin|><|tool_call_begin|>w:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
MESSAGE = {
    "role": "assistant",
    "content": "Ok!",
    "refusal": None,
    "reasoning_content": "Hm",
    "tool_calls": [{"id": "functions.w:0", "type": "function", "function": {"name": "w", "arguments": "{}"}}],
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = write_planted_kimi(tmp_path_factory.mktemp("planted"), SCRIPT)
    flags = ("--threads", "1", "--dtype", "float32", "--served-name", "kimi")
    with RunningServer(model, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, *messages: dict[str, Any], **body: Any) -> httpx.Response:
    content = {"messages": [USER, *messages], "temperature": 0, "max_tokens": 60, "tools": TOOLS, **body}
    response = http.post("/v1/chat/completions", json=content)
    assert response.status_code == 200, response.text
    return response


def test_the_parsers_are_chosen_by_the_model(http: httpx.Client) -> None:
    assert http.get("/server_info").json()["parsers"] == {"tool_calls": "kimi_k2", "reasoning": "kimi_k2"}


def test_an_answer_thinks_speaks_and_calls(http: httpx.Client) -> None:
    answer = ask(http).json()
    (choice,) = answer["choices"]
    assert choice["message"] == MESSAGE
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_stream_is_the_same(http: httpx.Client) -> None:
    lines = ask(http, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field, "") for delta in deltas) == MESSAGE[field]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert (pieces[0]["id"], pieces[0]["function"]["name"]) == ("functions.w:0", "w")
    assert "".join(piece["function"]["arguments"] for piece in pieces) == "{}"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_thinking_off_and_the_turn_after_a_call(http: httpx.Client) -> None:
    result = {"role": "tool", "tool_call_id": "functions.w:0", "content": "42"}
    off = {"chat_template_kwargs": {"thinking": False}}
    message = ask(http, MESSAGE, result, **off).json()["choices"][0]["message"]
    assert message == {name: value for name, value in MESSAGE.items() if name != "reasoning_content"}


def test_without_tools_it_ends_where_the_model_ends(http: httpx.Client) -> None:
    """At <|im_end|>, which is named in config.json, and not in the tokenizer's own eos_token."""
    (choice,) = ask(http, tools=[]).json()["choices"]
    assert choice["message"]["content"] == SCRIPT.partition("</think>")[2].removesuffix("<|im_end|>")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
