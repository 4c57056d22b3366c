"""Synthetic prompts and those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base.errors import UsageError
from firstlight.bench.serving.prompts import SyntheticPrompts, read_requests, repeated, synthetic_requests


def test_synthetic_prompts_have_their_length_and_differ() -> None:
    prompts = SyntheticPrompts(num_tokens=64).make(20, 0, as_text=False)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20


def test_they_share_the_prefix_that_was_asked_for_and_no_more() -> None:
    prompts = SyntheticPrompts(num_tokens=64, num_shared=32).make(20, 0, as_text=False)
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 20


def test_a_seed_decides() -> None:
    kind = SyntheticPrompts(num_tokens=8)
    assert kind.make(3, 5, as_text=True) == kind.make(3, 5, as_text=True)
    assert kind.make(3, 5, as_text=False) != kind.make(3, 6, as_text=False)


def test_chat_gets_text() -> None:
    (request,) = synthetic_requests(SyntheticPrompts(num_tokens=9), "chat", 1, 0)
    assert len(request["messages"][0]["content"].split()) == 9


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n')
    assert read_requests(path, "completions") == [{"prompt": "a", "max_tokens": 3}, {"prompt": [1, 2]}]


def test_a_text_prompt_becomes_a_message(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    contents = [request["messages"][0]["content"] for request in read_requests(path, "chat")]
    assert contents == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "api", "says"),
    [
        ("", "chat", "no prompt"),
        ("{", "chat", "p.jsonl:1"),
        ('{"text": "a"}', "chat", "either prompt or messages"),
        ('["a"]', "chat", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "chat", "either prompt or messages"),
        ('{"messages": []}', "completions", "does not take"),
        ('{"prompt": [1]}', "chat", "does not take"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, api: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_requests(path, api)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        read_requests(tmp_path / "nowhere.jsonl", "chat")


def test_too_few_are_used_again() -> None:
    assert repeated([{"a": 1}, {"a": 2}], 3) == [{"a": 1}, {"a": 2}, {"a": 1}]
