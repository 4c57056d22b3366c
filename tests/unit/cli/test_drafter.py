"""`firstlight drafter`: the stages one after the other over a tiny model, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from firstlight.cli.main import make_app
from support.drafters import write_prompt_file
from support.serving import write_chat_model

runner = CliRunner()


def typed(*words: str, code: int = 0) -> str:
    done = runner.invoke(make_app(), ["drafter", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_the_stages_as_they_are_typed(tmp_path: Path) -> None:
    out = [
        "--out",
        str(tmp_path / "run"),
        "--target",
        str(write_chat_model(tmp_path / "tiny", max_position=1024)),
    ]
    questions = str(write_prompt_file(tmp_path / "questions.jsonl", 40))
    layers = ["--layer", "0", "--layer", "1"]
    nothing_else = ["--templates", "0", "--gym", "0", "--self", "0"]
    assert "40 prompts" in typed("prompts", *out, "--file", questions, *nothing_else)
    made = typed("generate", *out, *layers, "--max-tokens", "16", "--threads", "1", "--temperature", "0.7")
    assert "40 answers" in made
    captured = typed("capture", *out, *layers, "--threads", "1", "--compare")
    assert "of plain prefill" in captured
    small = ["--draft-vocabulary", "60", "--unroll", "2", "--row-tokens", "128", "--epochs", "1"]
    typed("train", *out, *small, "--loss", "lk-lambda", "--max-steps", "1")
    assert "step" in typed("train", *out, *small, "--loss", "lk-lambda")
    settings = json.loads((tmp_path / "run" / "train" / "manifest.json").read_text())["settings"]
    assert (settings["loss"], settings["num_steps"], settings["draft_vocab_size"]) == ("lk-lambda", 2, 60)
    assert "eagle3" in typed("evaluate", *out, "--drafts", "2", "--documents", "2")
    typed("export", *out)
    assert (tmp_path / "run" / "export" / "gguf" / "CONVERT.md").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_command_makes_it_and_goes_on_from_what_there_is(tmp_path: Path) -> None:
    target = str(write_chat_model(tmp_path / "tiny", max_position=1024))
    questions = str(write_prompt_file(tmp_path / "questions.jsonl", 30))
    few = ["--templates", "0", "--gym", "0", "--self", "0", "--file", questions, "--max-tokens", "32"]
    how = ["--draft-vocabulary", "60", "--epochs", "12", "--learning-rate", "0.01", "--threads", "1"]
    words = ["run", "--target", target, *few, *how]
    out = tmp_path / "run"
    shown = typed(*words, "--layer", "0", "--layer", "1", "--out", str(out))
    assert shown.count("(open): ") == 5
    assert shown.count("(too few to judge): ") == 3, "a handful of held-out answers judges nothing"
    card = (out / "export" / "native" / "README.md").read_text()
    assert "engine acceptance" in card.partition("## Data")[0]
    assert "in domain" in shown
    weights = out / "export" / "native" / "model.safetensors"
    made = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*.safetensors"))}
    report = (out / "evaluate" / "report.json").stat().st_mtime_ns

    again = typed(*words, "--layer", "0", "--layer", "1", "--out", str(out))
    assert again.count("(open, measured before): ") == 5
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*.safetensors"))} == made
    assert (out / "evaluate" / "report.json").stat().st_mtime_ns == report

    warm = typed(*words, "--init-from", str(weights.parent), "--out", str(tmp_path / "warm"))
    assert warm.count("(open): ") == 5, "the states are those of the drafter that it starts from"
    settings = json.loads((tmp_path / "warm" / "train" / "manifest.json").read_text())["settings"]
    assert settings["init_from"]


def test_what_cannot_end_well_is_told_before_hours_of_answers(tmp_path: Path) -> None:
    target = str(write_chat_model(tmp_path / "tiny", max_position=1024))
    for words, said, code in (
        (["--loss", "mse"], "mse", 2),
        (["--dtype", "int4"], "int4", 2),
        (["--device", "abacus"], "abacus", 2),
        (["--init-from", str(tmp_path / "nobody")], "nobody", 3),
        (["--templates", "0", "--gym", "0", "--self", "0"], "There is not one prompt", 2),
    ):
        shown = typed("run", "--target", target, "--out", str(tmp_path / "run"), *words, code=code)
        assert said in shown
        assert not (tmp_path / "run").exists()
