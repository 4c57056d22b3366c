"""`firstlight run` and `firstlight convert` as a person calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.base.phases import PHASES
from support.serving import write_chat_gguf, write_chat_model


def firstlight(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "firstlight", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def test_one_prompt_gives_its_answer_and_nothing_else(model: Path) -> None:
    done = firstlight("run", "Hello", "--model", str(model), "--max-tokens", "8", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    phases = [line.split()[2] for line in done.stderr.splitlines()]
    assert phases[0] == "imports", "it says what it does before torch is there"
    assert phases[-1] == "generate"
    assert set(phases) <= set(PHASES)
    again = firstlight("run", "Hello", "--model", str(model), "--max-tokens", "8", "--threads", "1")
    assert again.stdout == done.stdout


def test_a_file_of_prompts_is_answered_in_order(model: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "b"}]
    prompts.write_text('{"prompt": "a"}\n' + json.dumps({"id": "second", "messages": messages}) + "\n")
    flags = ("--model", str(model), "--max-tokens", "5", "--threads", "1")
    done = firstlight("run", "--input", str(prompts), "--output", str(answers), *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, "second"]
    assert all(0 < row["num_tokens"] <= 5 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "either a prompt or --input"),
        (("x", "--max-tokens", "0"), 2, "max_tokens is 0"),
        (("--input", "/nowhere.jsonl"), 2, "cannot read /nowhere.jsonl"),
        (("x", "--output", "/nowhere/answers"), 5, "cannot write /nowhere/answers"),
        (("x", "--model", "./nowhere.gguf"), 3, "does not exist"),
        (("x", "--chat-template", "/nowhere.jinja"), 2, "cannot be read"),
        (("x", "--max-model-len", "1"), 2, "--max-model-len 1 is too short"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = firstlight("run", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""


def test_a_converted_model_runs(tmp_path: Path) -> None:
    source = write_chat_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    done = firstlight("convert", str(source), str(folder), "--dtype", "f32")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    answered = [
        firstlight("run", "Hello", "--model", str(path), "--max-tokens", "4", "--threads", "1")
        for path in (source, folder)
    ]
    assert [one.returncode for one in answered] == [0, 0], answered[0].stderr
    assert answered[0].stdout == answered[1].stdout
