"""JSON lines of prompts and answers."""

from __future__ import annotations

import json

import pytest

from firstlight.base.errors import UsageError
from firstlight.cli.prompts_file import Prompt, answer_line, read_prompts


def test_text_and_chats_mix_and_ids_come_back() -> None:
    lines = ['{"prompt": "a"}', "", '{"id": "x", "messages": [{"role": "user", "content": "b"}]}']
    prompts = read_prompts(lines, "f")
    assert prompts == [Prompt(1, "a"), Prompt("x", None, [{"role": "user", "content": "b"}])]
    assert json.loads(answer_line(prompts[1], {"text": "ü"})) == {"id": "x", "text": "ü"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of f is not JSON"),
        ("3", "not a JSON object"),
        ("{}", "either a prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user"}]}', "either a prompt or messages"),
        ('{"prompt": 3}', "is not text"),
        ('{"messages": []}', "list of objects with a role"),
        ('{"messages": ["hi"]}', "list of objects with a role"),
        ('{"prompt": "a", "temperature": 1}', "unknown keys: temperature"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_prompts(['{"prompt": "fine"}', line], "f")


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompts(["\n"], "f")
