"""Prompts: families, files, hold-outs, and nothing twice."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.drafter import families
from firstlight.drafter.capture import CaptureSettings
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.loops import loop_start
from firstlight.drafter.prompt_files import read_prompt_file
from firstlight.drafter.prompts import (
    HELD_OUT_FAMILY,
    SELF,
    TRAIN,
    PromptSettings,
    identify,
    make_prompts,
    read_prompts,
)
from firstlight.drafter.target import Target, open_target
from support.drafters import SMALL_ENGINE, write_prompt_file
from support.serving import write_chat_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return open_target(write_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("name", families.TEMPLATES)
def test_a_family_repeats_with_its_seed_and_varies_without(name: str) -> None:
    make = families.TEMPLATES[name]
    first = [make(random.Random(seed)) for seed in range(20)]
    assert first == [make(random.Random(seed)) for seed in range(20)]
    assert len(set(first)) > 10
    assert all("  " not in text and text == text.strip() for text in first)


def test_held_out_families_are_never_trained_on(target: Target, tmp_path: Path) -> None:
    make_prompts(tmp_path, target, PromptSettings(num_templates=200, num_gym=0, num_self=0), {})
    prompts = read_prompts(tmp_path)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    by_family = {prompt.family for prompt in prompts}
    assert by_family == set(families.TEMPLATES)
    for prompt in prompts:
        assert (prompt.split == HELD_OUT_FAMILY) == (prompt.family in families.HELD_OUT)
    trained = [prompt for prompt in prompts if prompt.split == TRAIN]
    assert 0.7 * len(prompts) < len(trained) < len(prompts)


def test_duplicates_are_removed_whatever_their_spaces(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Hello there"}\n{"prompt": "hello   THERE"}\n{"prompt": "Other"}\n')
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(path),))
    make_prompts(tmp_path, target, settings, {})
    assert [p.family for p in read_prompts(tmp_path)] == ["own", "own"]


def test_the_target_makes_prompts_itself(target: Target, tmp_path: Path) -> None:
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=40, files=())
    make_prompts(tmp_path, target, settings, SMALL_ENGINE)
    prompts = read_prompts(tmp_path)
    assert all(prompt.family == SELF and prompt.messages[0]["content"] for prompt in prompts)


def test_other_settings_do_not_mix_with_what_is_there(target: Target, tmp_path: Path) -> None:
    settings = PromptSettings(num_templates=20, num_gym=0, num_self=0)
    make_prompts(tmp_path, target, settings, {})
    before = (tmp_path / "prompts" / "prompts.jsonl").read_bytes()
    make_prompts(tmp_path, target, settings, {})
    assert (tmp_path / "prompts" / "prompts.jsonl").read_bytes() == before
    with pytest.raises(UsageError, match="was begun with num_templates = 20, and now it is 21"):
        make_prompts(tmp_path, target, PromptSettings(num_templates=21, num_gym=0, num_self=0), {})


def test_a_changed_prompt_file_is_noticed(target: Target, tmp_path: Path) -> None:
    make_prompts(tmp_path, target, PromptSettings(num_templates=20, num_gym=0, num_self=0), {})
    path = tmp_path / "prompts" / "prompts.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match="is not the file that the stage wrote"):
        read_prompts(tmp_path)


def test_three_kinds_of_files(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "It is one."},
        {"role": "user", "content": "Two?"},
    ]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    own = {"messages": [*messages, {"role": "assistant", "content": "2"}]}
    rows = [own, {"conversations": turns}, "text"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    expected = [messages, [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "text"}]]
    assert [asked.messages for asked in read_prompt_file(path)] == expected
    path.write_text(json.dumps(rows))
    assert [asked.messages for asked in read_prompt_file(path)] == expected
    assert len(read_prompt_file(write_prompt_file(tmp_path / "plain.jsonl", 5))) == 5


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_tools_their_calls_and_reasoning_stay(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Is it raining?"},
        {"role": "assistant", "content": "", "reasoning_content": "I must look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]
    rows = [
        {"messages": [*messages, {"role": "assistant", "content": "It is."}], "tools": [WEATHER]},
        {
            "conversations": [{"from": "human", "value": "Hm?"}, {"from": "observation", "value": "yes"}],
            "tools": json.dumps([WEATHER]),
        },
    ]
    path = tmp_path / "tools.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = read_prompt_file(path)
    assert first.messages == messages
    assert first.tools == second.tools == [WEATHER]
    assert [message["role"] for message in second.messages] == ["user", "tool"]
    names = {identify(first.messages, tools) for tools in ([], [WEATHER])}
    names.add(identify([messages[0], {**messages[1], "reasoning_content": "No."}, messages[2]]))
    assert len(names) == 3


def test_tools_that_the_template_would_drop_are_refused(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"prompt": "Hello", "tools": [WEATHER]}))
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(path),))
    with pytest.raises(UsageError, match="record 1 has tools, and the target's chat template shows none"):
        make_prompts(tmp_path, target, settings, {})


def test_a_template_that_knows_tools_shows_them(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "tiny")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + config["chat_template"]
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"prompt": "Hello", "tools": [WEATHER]}))
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(path),))
    target = open_target(model)
    make_prompts(tmp_path, target, settings, {})
    (prompt,) = read_prompts(tmp_path)
    assert prompt.tools == [WEATHER]
    assert target.text.render_chat(prompt.messages, tools=prompt.tools).startswith("<weather>")


class Gym(ModuleType):
    """What we use of reasoning_gym: a data set of one question for a task and a seed."""

    def create_dataset(self, task: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"question": f"{task}, number {seed}?"}] * size


def test_reasoning_gym_s_tasks_are_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "find_spec", lambda name: None)
    assert families.gym_families() == {}
    monkeypatch.setattr(families, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "reasoning_gym", Gym("reasoning_gym"))
    made = families.gym_families()
    assert set(families.GYM_HELD_OUT) < set(made) == {f"gym-{task}" for task in families.GYM_TASKS}
    for name, make in made.items():
        assert make(random.Random(1)) == make(random.Random(1)) != make(random.Random(2))
        assert make(random.Random(1)).startswith(name.removeprefix("gym-"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt"', "line 2"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "record 1: there is no user message"),
        ("7", "record 1 is 7, and no conversation"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "no user message in it, only robot"),
        ('{"prompt": "fine"}\n{"prompt": " "}', "record 2: its question is empty"),
        ('{"messages": [{"role": "user", "content": null}]}', "record 1: its question is empty"),
        (
            '{"prompt": "fine"}\n\n{"conversations": [{"from": "alien", "value": "x"}]}',
            "line 3, record 2, turn 1: its",
        ),
        ('{"conversations": [{"value": "x"}]}', 'turn 1: its speaker is "from": null'),
        ('{"conversations": [{"from": 7, "value": "x"}]}', 'its speaker is "from": 7'),
        ('{"conversations": [{"from": "human"}]}', "turn 1: its value is null, no text"),
        ('{"conversations": [{"from": "human", "value": ["x"]}]}', "its value is"),
        ('{"conversations": ["x"]}', "its conversations are"),
        ('{"messages": {"role": "user"}}', "its messages are"),
        ('{"messages": ["hello"]}', "its messages are"),
        (
            '{"messages": [{"role": "robot", "content": "x"}, {"role": "user", "content": "y"}]}',
            'message 1: its role is "robot"',
        ),
        ('{"messages": [{"role": "user", "content": 7}]}', "message 1: its content is 7"),
        ('{"messages": [{"role": "user", "content": {"text": "x"}}]}', "message 1: its content is"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": "x"}, {"role": "user", "content": "y"}]}',
            "its tool_calls are",
        ),
        ('{"prompt": "x", "tools": "[{"}', "its tools are"),
        ('{"prompt": "x", "tools": {"a": 1}}', "its tools are"),
        ('{"prompt": 7}', "and no conversation"),
        ("", "has no prompts in it"),
        ("[]", "has no prompts in it"),
    ],
)
def test_a_record_that_is_not_understood_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=words):
        read_prompt_file(path)


def test_bad_records_are_skipped_and_counted(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        '{"prompt": "One?"}\n{"conversations": [{"from": "alien", "value": "x"}]}\n{"prompt"\n'
        '{"conversations": [{"from": "human", "value": "Two?"}], "system": "Be brief."}\n'
    )
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(path),), skip_bad=True)
    stage = make_prompts(tmp_path, target, settings, {})
    assert stage.manifest.numbers["prompts"] == 2
    assert stage.manifest.numbers["skipped_records"] == {str(path): 2}
    said = capsys.readouterr().err
    assert "2 records of" in said
    assert "--skip-bad" in said
    roles = {tuple(message["role"] for message in prompt.messages) for prompt in read_prompts(tmp_path)}
    assert roles == {("user",), ("system", "user")}
    path.write_text('{"conversations": [{"from": "alien", "value": "x"}]}')
    with pytest.raises(ModelFileError, match="has no prompts in it that can be used"):
        read_prompt_file(path, lambda _: None)


def test_a_prompt_that_is_too_long_is_said_with_its_option(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 40}) + '\n{"prompt": "Hi"}\n')
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(path),))
    make_prompts(tmp_path, target, settings, {})
    states = CaptureSettings(layers=(0, 1), dtype="float32")
    few = GenerateSettings(max_tokens=8, max_prompt_tokens=60)
    stage = generate(tmp_path, target, few, states, SMALL_ENGINE)
    assert stage.manifest.numbers["too_long_prompts"] == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 prompts are not answered: they have more than 60 tokens" in said
    assert "--max-prompt-tokens takes longer ones" in said


def test_a_name_is_made_of_roles_and_content() -> None:
    assert identify([{"role": "user", "content": "A"}]) != identify([{"role": "system", "content": "A"}])


def test_a_loop_is_cut_where_its_second_round_begins() -> None:
    round_ = list(range(100, 112))
    assert loop_start([1, 2, 3, *round_ * 4]) == 3 + len(round_)
    assert loop_start([*range(50), 7, *range(40)]) is None
    assert loop_start([5] * 40) == 8
    assert loop_start([]) is None


def test_a_folder_given_as_a_file_is_called_one(target: Target, tmp_path: Path) -> None:
    settings = PromptSettings(num_templates=0, num_gym=0, num_self=0, files=(str(tmp_path),))
    with pytest.raises(UsageError, match="is a folder"):
        make_prompts(tmp_path, target, settings, {})
