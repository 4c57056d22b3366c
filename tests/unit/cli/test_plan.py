"""`firstlight plan` from outside: what it prints, what it refuses, and that it loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from firstlight.cli.main import make_app
from shape.source import REPOSITORY

APP = make_app()
EIGHT = ("kimi-k2.5", "--gpus", "8", "--gpu-memory", "96GB")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(APP, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def folder(path: Path, **changes: Any) -> str:
    path.mkdir()
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_the_tables_of_kimi() -> None:
    result = plan(*EIGHT, "--observed", "3:0.15:0.66")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "kimi-k2.5 (kimi_k2) on 8 ranks: 64 files, 208,215 tensors, 594.21 GB (553.4 GiB)" in lines
    starts = (
        "routed experts 207,360 570.76 GB 11.89 GB 71.35 GB",
        "every rank reads everything 4753.65 GB 8.0x 8.0x",
        "weights 78.24 GB",
        "1 6.03 GB 3.35 ms",
        "3, as observed 2.20 40% 0.61",
    )
    for start in starts:
        assert any(line.startswith(start) for line in lines), start
    assert max(len(line) for line in result.stdout.splitlines()) <= 120


def test_the_printed_plan_in_the_documents_is_the_one_that_is_printed() -> None:
    text = (REPOSITORY / "docs" / "plan.md").read_text()
    command, _, shown = text.partition("$ firstlight ")[2].partition("```")[0].partition("\n")
    assert CliRunner().invoke(APP, command.split()).stdout == shown


def test_the_same_as_json() -> None:
    found = planned(*EIGHT)
    assert found["num_all_reduces"] == 122
    assert found["kv_token_bytes"] == 70_272
    assert [line["name"] for line in found["memory"]][:2] == ["weights", "activations"]
    assert found["steps"][0]["total_s"] > found["steps"][0]["all_reduce_s"] > 0
    assert [row["num_drafts"] for row in found["drafts"]] == [1, 2, 3, 4, 5]
    assert found["observed"] is None


def test_flags_reach_the_arithmetic() -> None:
    base = planned(*EIGHT)
    times = planned(*EIGHT, "--all-reduce-times", "14K:47", "--wire-bytes", "4", "--layer-time", "0")
    assert times["steps"][0]["other_s"] == 0.0
    assert times["message_bytes"] == 2 * base["message_bytes"]
    assert times["steps"][0]["all_reduce_s"] > 122 * 47e-6
    fast = planned(*EIGHT, "--link", "nvlink", "--memory-rate", "3.6TB/s", "--all-reduce", "one-shot")
    assert fast["steps"][0]["weights_s"] == pytest.approx(base["steps"][0]["weights_s"] / 2)
    assert "one-shot over nvlink" in fast["all_reduce_words"]
    halved = planned(*EIGHT, "--kv-dtype", "int8", "--memory-fraction", "0.9")
    assert halved["kv_token_bytes"] == 61 * (576 + 8)
    assert halved["kv_tokens"] > 2 * base["kv_tokens"]
    assert planned(*EIGHT, "--expert-parallel")["expert_parallel"] is True


def test_memory_that_does_not_suffice() -> None:
    result = plan("kimi-k2.5", "--gpus", "4", "--gpu-memory", "96GB")
    assert result.exit_code == 5
    assert "it does not fit" in result.stdout  # the tables stand there all the same
    assert "error: It does not fit: each rank lacks 62.98 GiB." in result.stderr
    assert "Use --gpus 8, or take GPUs of 171 GiB (--gpu-memory 171G)" in result.stderr
    assert plan("kimi-k2.5", "--gpus", "8", "--gpu-memory", "96GB").exit_code == 0


def test_a_longer_sequence_than_fits() -> None:
    result = plan(*EIGHT, "--max-model-len", "131072")
    assert result.exit_code == 5
    assert "raise --memory-fraction to 0.8" in result.stderr.lower()
    assert "set --max-model-len to 91056 or less" in result.stderr
    assert "--gpus 16" in result.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--context", "300000"), "--context 300000 is longer than the model's sequences"),
        (("--max-model-len", "1000000"), "--max-model-len 1000000 is longer than the model's sequences"),
        (("--max-model-len", "2048", "--context", "4096"), "longer than --max-model-len 2048 allows"),
    ],
    ids=str,
)
def test_lengths_that_the_model_does_not_have(flags: tuple[str, ...], says: str) -> None:
    result = plan(*EIGHT, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert "262144" in result.stderr or "2048" in result.stderr


def test_without_context_it_is_no_longer_than_the_longest_sequence(tmp_path: Path) -> None:
    short = planned(folder(tmp_path / "model"), "--gpu-memory", "4G")
    assert (
        short["steps"] == planned(str(tmp_path / "model"), "--gpu-memory", "4G", "--context", "256")["steps"]
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    result = plan("kimi-k2")
    assert result.exit_code == 2
    assert (
        "'kimi-k2' is neither a file, nor a folder, nor a model that firstlight knows by name"
        in result.stderr
    )
    assert "Known by name: kimi-k2.5." in result.stderr
    assert "hf download" in result.stderr


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    result = plan(folder(tmp_path / "model", **{missing: None}))
    assert result.exit_code == 3
    assert f"config.json: the field {missing} is missing" in result.stderr


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    found = planned(folder(tmp_path / "model"), "--gpu-memory", "4G")
    assert found["num_files"] == 0
    assert found["kv_token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert found["num_all_reduces"] == 0
    assert found["observed"] is None


def test_a_configuration_whose_packing_is_not_known(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", quantization_config={"quant_method": "awq", "bits": 4})
    result = plan(path)
    assert result.exit_code == 4
    assert "'awq' weights are not known from the configuration alone" in result.stderr
    assert "then their headers are read" in result.stderr


def test_blocks_of_fp8_by_the_configuration_alone(tmp_path: Path) -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    plain = planned(folder(tmp_path / "plain"), "--gpu-memory", "4G")
    packed = planned(folder(tmp_path / "packed", quantization_config=blocks), "--gpu-memory", "4G")
    assert packed["num_tensors"] == plain["num_tensors"] + 2 * 7  # a scale beside each matrix of a layer
    assert packed["total_bytes"] < plain["total_bytes"]


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--gpu-memory", "much", "--gpu-memory 'much' cannot be read"),
        ("--gpu-memory", "0", "is too small"),
        ("--memory-rate", "1.8", None),
        ("--memory-rate", "fast", "--memory-rate 'fast' cannot be read"),
        ("--link", "string", "--link string is not known"),
        ("--all-reduce", "tree", "--all-reduce tree is not known"),
        ("--all-reduce-times", "4K", "'4K', which is no SIZE:MICROSECONDS"),
        ("--observed", "3:0.15", "no K:ACCEPTANCE:GAIN"),
        ("--observed", "3:1.5:1", "no K:ACCEPTANCE:GAIN"),
        ("--memory-fraction", "7", "must be at most 0.98"),
    ],
)
def test_values_that_cannot_be_read(flag: str, value: str, says: str | None) -> None:
    result = plan(*EIGHT, flag, value)
    if says is None:
        assert result.exit_code == 0
    else:
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr
        assert "what to do:" in result.stderr


def test_more_ranks_than_the_model_can_be_split_into(tmp_path: Path) -> None:
    result = plan(folder(tmp_path / "model"), "--tensor-parallel", "8")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot be split over 8 ranks" in result.stderr
    assert "Use --tensor-parallel 4 or less" in result.stderr


def test_it_loads_no_torch() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from firstlight.cli.main import make_app\n"
        f"result = CliRunner().invoke(make_app(), ['plan', *{EIGHT!r}])\n"
        "print(result.exit_code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "0 False False\n"
