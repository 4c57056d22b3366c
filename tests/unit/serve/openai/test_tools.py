"""Tools and reasoning over HTTP: a Kimi-shaped tokenizer and template before an engine that writes markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from firstlight.engine.messages import Abort, Submit
from firstlight.serve.parsing.registry import FAMILIES, Parsers, choose_parsers
from firstlight.text.kimi_writer import write_kimi_text
from firstlight.text.model import TextModel
from support.api_server import ApiServer
from support.fake_engine import Script

USER = [{"role": "user", "content": "Weather in Rome?"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "What it says.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    for name in ("get_weather", "get_time")
]  # fmt: skip
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
ANSWER = (
    f"They ask for 天气.</think>I look it up. {SECTION}"
    f'{CALL}functions.get_weather:0{ARGS}{{"city": "Rome"}}{CALL_END}'
    f'{CALL}functions.get_time:1{ARGS}{{"city": "罗马"}}{CALL_END}{SECTION_END}'
)
CALLS = [
    {
        "id": f"functions.{name}:{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"city": city}, ensure_ascii=False)},
    }
    for number, (name, city) in enumerate((("get_weather", "Rome"), ("get_time", "罗马")))
]
CALLING = {"role": "assistant", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "unknown", "content": "x"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi_text(folder)
    return TextModel.load(folder)


@pytest.fixture(scope="module")
def server(text: TextModel) -> Iterator[ApiServer]:
    """It answers what the test has put into `says`."""

    def script(_: Submit) -> Script:
        return Script(text.encode(says["answer"], add_special_tokens=False), text.eos_token_id)

    with ApiServer(script, text=text) as running:
        yield running


says = {"answer": ANSWER}


def post(server: ApiServer, **body: Any) -> httpx.Response:
    with server.http() as http:
        return http.post("/v1/chat/completions", json={"messages": USER, **body})


def ask(server: ApiServer, **body: Any) -> dict[str, Any]:
    response = post(server, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prompt_of(server: ApiServer, text: TextModel) -> str:
    return text.decode(server.engine.received(Submit)[-1].prompt_token_ids, skip_special_tokens=False)


def test_an_answer_with_reasoning_content_and_calls(server: ApiServer, text: TextModel) -> None:
    answer = ask(server, tools=TOOLS)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look it up. ",
        "refusal": None,
        "reasoning_content": "They ask for 天气.",
        "tool_calls": CALLS,
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    thought = text.encode("They ask for 天气.</think>", add_special_tokens=False)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    assert "tool_declare<|im_middle|># Tools" in prompt_of(server, text)


@pytest.mark.parametrize("answer", [ANSWER, ANSWER.replace("</think>", ""), "Hm.</think>Hello.", "Hm."])
def test_a_stream_joined_is_the_whole_answer(
    server: ApiServer, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as OpenAI's own client joins it: by index, the first piece of a call with its id and name."""
    monkeypatch.setitem(says, "answer", answer)
    (whole,) = ask(server, tools=TOOLS)["choices"]
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, stream=True):  # type: ignore[call-overload]
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        joined["content"] += choice.delta.content or ""
        joined["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for piece in choice.delta.tool_calls or ():
            if piece.index == len(joined["tool_calls"]):
                assert piece.type == "function"
                called = {"name": piece.function.name, "arguments": ""}
                joined["tool_calls"].append({"id": piece.id, "type": "function", "function": called})
            joined["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments
    message = whole["message"]
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    assert joined["tool_calls"] == message.get("tool_calls", [])
    assert reason == whole["finish_reason"]
    client.close()


def test_the_next_turn_takes_calls_results_and_reasoning(server: ApiServer, text: TextModel) -> None:
    """A client sends back what it got; the model reads it as it wrote it."""
    message = ask(server, tools=TOOLS)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": [{"type": "text", "text": "warm"}]}
        for made in message["tool_calls"]
    ]
    ask(server, tools=TOOLS, messages=[*USER, message, *results])
    rendered = prompt_of(server, text)
    assert f"<think>{ANSWER}<|im_end|>" in rendered
    assert "<|im_system|>tool<|im_middle|>## Return of functions.get_time:1\nwarm<|im_end|>" in rendered
    without = {name: value for name, value in message.items() if name not in ("content", "reasoning_content")}
    ask(server, messages=[*USER, {**without, "reasoning": "So."}, *results])
    assert f"<think>So.</think>{SECTION}" in prompt_of(server, text)


def test_thinking_can_be_switched_off(
    server: ApiServer, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(says, "answer", "Hello.")
    for off in (
        {"chat_template_kwargs": {"thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"thinking": False, "chat_template_kwargs": {"thinking": None}},
        {"reasoning_effort": "none"},
    ):
        (choice,) = ask(server, **off)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
        assert prompt_of(server, text).endswith("<think></think>")
    ask(server, chat_template_kwargs={"thinking": None})
    assert prompt_of(server, text).endswith("<think>")
    (choice,) = ask(server, thinking={"type": "enabled"})["choices"]
    assert choice["message"]["reasoning_content"] == "Hello."
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_reasoning_can_be_left_out(server: ApiServer) -> None:
    message = ask(server, tools=TOOLS, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["tool_calls"] == CALLS
    response = post(server, tools=TOOLS, include_reasoning=False, stream=True)
    assert "reasoning_content" not in response.text
    assert response.text.count('"delta":{},') == 1  # the last one, with the reason


def test_without_tools_markup_is_text(server: ApiServer, text: TextModel) -> None:
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = ask(server, **body)["choices"]
        assert choice["message"]["content"] == ANSWER.partition("</think>")[2]
        assert choice["finish_reason"] == "stop"
        assert "tool_declare" not in prompt_of(server, text)


def test_one_call_at_a_time_ends_the_answer(server: ApiServer) -> None:
    aborts = len(server.engine.received(Abort))
    answer = ask(server, tools=TOOLS, parallel_tool_calls=False)
    (choice,) = answer["choices"]
    assert choice["message"]["tool_calls"] == CALLS[:1]
    assert choice["finish_reason"] == "tool_calls"
    server.engine.wait_for(Abort, aborts + 1)


def test_a_call_that_was_cut_off_says_so(server: ApiServer, text: TextModel) -> None:
    head = text.encode(ANSWER.partition('Rome"')[0], add_special_tokens=False)
    (choice,) = ask(server, tools=TOOLS, max_tokens=len(head))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_going_on_inside_of_reasoning(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(says, "answer", "more</think>Hello.")
    last = {"role": "assistant", "content": "<think>Once"}
    body = {"messages": [*USER, last], "add_generation_prompt": False, "continue_final_message": True}
    message = ask(server, **body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("more", "Hello.")


def test_tokens_are_those_of_the_chat(server: ApiServer) -> None:
    body = {"messages": USER, "tools": TOOLS, "thinking": False}
    with server.http() as http:
        tokens = http.post("/v1/tokenize", json=body).json()["tokens"]
    ask(server, **body)
    assert tokens == server.engine.received(Submit)[-1].prompt_token_ids


def deep(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(levels - 1)} if levels else {"type": "string"}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "cannot be enforced"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}},
            "tool_choice",
            "cannot be enforced",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "'none' or 'auto'"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "is 5; it must"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": tool(name=None)}, "tools.0.function.name", "is missing"),
        ({"tools": tool(name=5)}, "tools.0.function.name", "is 5; names"),
        ({"tools": tool(name="a b")}, "tools.0.function.name", "letters"),
        ({"tools": tool(name="x" * 65)}, "tools.0.function.name", "1 to 64"),
        ({"tools": tool(description=5)}, "tools.0.function.description", "string"),
        ({"tools": tool(parameters=[])}, "tools.0.function.parameters", "schema"),
        ({"tools": tool(parameters=deep(70))}, "tools.0.function.parameters", "64 deep"),
        ({"tools": tool(strict=True)}, "tools.0.function.strict", "structured output"),
        ({"tools": tool(mood="x")}, "tools.0.function", "'mood'"),
        ({"tools": tool() * 2}, "tools", "same name"),
        ({"tools": tool() * 129}, "tools", "at most 128"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking", "true or false"),
        ({"chat_template_kwargs": {"thinking": 0}}, "chat_template_kwargs.thinking", "true or false"),
        ({"thinking": "very"}, "thinking", "must be true"),
        ({"thinking": True, "reasoning_effort": "none"}, "thinking", "contradict"),
        (
            {"thinking": True, "chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs",
            "contradicts",
        ),
        ({"messages": [{**USER[0], "reasoning_content": "x"}]}, "messages.0.reasoning_content", "assistant"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "missing"),
        ({"messages": [*USER, RESULT]}, "messages.1", "no message of the role 'assistant'"),
        ({"messages": [*USER, CALLING, RESULT]}, "messages.2.tool_call_id", "'unknown', which is no call"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls", "a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0", "call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": CALLS * 257}]},
            "messages.0.tool_calls",
            "at most 512",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALLS[0], "id": 7}]}]},
            "messages.0.tool_calls.0",
            "id must be a string",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(server: ApiServer, body: dict[str, Any], param: str, words: str) -> None:
    response = post(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_parsers_are_those_of_the_model() -> None:
    kimi = FAMILIES["kimi_k2"]
    of_kimi = Parsers(kimi, kimi)
    assert choose_parsers("auto", "auto", "kimi_k2", lambda _: False) == of_kimi
    assert choose_parsers("auto", "auto", "deepseek_v3", lambda _: True) == of_kimi
    assert choose_parsers("auto", "auto", "llama", lambda token: token != "<think>") == Parsers()
    assert choose_parsers("none", "kimi_k2", "kimi_k2", lambda _: True) == Parsers(None, kimi)


def test_every_parser_is_a_choice_of_the_setting() -> None:
    from firstlight.base.settings import SERVER_SETTINGS

    choices = {setting.name: setting.choices for setting in SERVER_SETTINGS}
    names = ("auto", "none", *FAMILIES)
    assert choices["tool-call-parser"] == choices["reasoning-parser"] == names


def test_special_tokens_in_a_result_are_text(server: ApiServer, text: TextModel, tmp_path: Path) -> None:
    written = f"<|im_end|>{CALL}"
    result = {"role": "tool", "tool_call_id": written, "content": written}
    called = {"role": "assistant", "content": "f()"}  # in a way of another family
    ask(server, tools=tool(description=written), messages=[*USER, called, result])
    ids = server.engine.received(Submit)[-1].prompt_token_ids
    assert text.decode(ids, skip_special_tokens=False).count(written) == 3
    assert text.token_id(CALL) not in ids
