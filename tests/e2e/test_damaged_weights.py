"""Weights that are no numbers, as clients and operators meet them: two ranks, a server, a batch of a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.engine.messages import NOT_NUMBERS
from firstlight.engine.worker.not_numbers import SOUND
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.damaged import EMBEDDING, change_tensor, damage_token, overflow_token
from support.engines import Harness, submit
from support.rank_processes import DEADLINE_S, RankProcesses, tokens_of
from support.serving import RunningServer, byte_tokenizer, write_chat_model

pytestmark = pytest.mark.timeout(600)
BAD = 61
SIZES = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256}


@pytest.mark.parametrize("drafting", [{}, {"drafter": "ngram", "draft_tokens": 3}], ids=["plain", "drafts"])
def test_two_ranks_finish_what_is_sound_and_name_the_tensor(tmp_path: Path, drafting: dict[str, Any]) -> None:
    description = tiny_description(num_heads=6, num_kv_heads=3, vocab_size=501)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    change_tensor(folder, "lm_head.weight", lambda values: values[BAD].zero_())  # it does not say it itself
    good = [submit(f"good {i}", [5 + i, 6, 7] * 5, max_tokens=24, ignore_eos=True) for i in range(3)]
    expected = Harness(folder, **SIZES).run(good)
    damage_token(folder, BAD)
    with RankProcesses(folder, 2, **SIZES, **drafting) as ranks:
        ranks.wait_until_ready()
        outputs = ranks.run([submit("bad", [3, BAD, 4] * 9), *good])
        failed = ranks.until_failed()
        code = ranks.processes[0].wait(60)
    assert str(outputs["bad"][-1].error).startswith(NOT_NUMBERS)
    for name, result in expected.items():
        assert tokens_of(outputs[name]) == result.tokens
    assert f"{folder / 'model.safetensors'}: the tensor {EMBEDDING} holds 64 NaN" in failed.message
    assert (failed.exit_code, code) == (3, 3)


def test_two_ranks_serve_on_where_only_a_prompt_was_to_blame(tmp_path: Path) -> None:
    description = tiny_description(num_heads=6, num_kv_heads=3, vocab_size=501)
    folder = write_hf_folder(tmp_path / "m", description, random_weights(description))
    change_tensor(folder, "lm_head.weight", lambda values: values[BAD].zero_())
    overflow_token(folder, BAD)
    good = [submit(f"good {i}", [5 + i, 6, 7] * 5, max_tokens=24, ignore_eos=True) for i in range(3)]
    with RankProcesses(folder, 2, dtype="auto", **SIZES) as ranks:
        ranks.wait_until_ready()
        outputs = ranks.run([submit("bad", [3, BAD, 4] * 9), *good])
        error, until_s = outputs["bad"][-1].error, time.monotonic() + DEADLINE_S
        while error is not None and SOUND not in error:  # that is said as soon as the weights were looked at
            assert error.startswith(NOT_NUMBERS)
            assert time.monotonic() < until_s, "nobody said what was found"
            error = ranks.run([submit("bad again", [BAD])])["bad again"][-1].error
        again = ranks.run([submit("one more", [9, 8, 7], max_tokens=5, ignore_eos=True)])
        assert ranks.drain() == [0, 0]
    assert error == f"{NOT_NUMBERS}, though {SOUND}"
    assert {len(tokens_of(outputs[item.request_id])) for item in good} == {24}
    assert len(tokens_of(again["one more"])) == 5


def test_a_server_answers_the_others_and_ends_as_one_with_a_bad_file(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "m")
    damage_token(folder, 200)
    with RunningServer(folder, "--threads", "1", "--dtype", "float32") as server:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 8, "temperature": 0, "logit_bias": {"200": -100}}
        url = f"{server.url}/v1/completions"
        good = httpx.post(url, json={**asked, "prompt": [5, 6, 7]}, timeout=60)
        bad = httpx.post(url, json={**asked, "prompt": [3, 200, 4]}, timeout=60)
        code = server.wait()
    assert (good.status_code, bad.status_code) == (200, 500)
    error = bad.json()["error"]
    assert error["code"] == "logits_not_numbers"
    assert "Others are not touched" in error["message"]
    assert code == 3
    said = "\n".join(server.lines)
    assert f"the tensor {EMBEDDING} holds 64 NaN among its" in said
    assert "Download the file again" in said
    assert "bug" not in said


def test_a_start_with_a_damaged_norm_ends_as_one_with_a_bad_file(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "m")
    norm = "model.layers.1.input_layernorm.weight"
    change_tensor(folder, norm, lambda values: values[5].fill_(float("inf")))
    server = RunningServer(folder, "--threads", "1")
    try:
        assert server.wait() == 3
    finally:
        server.kill()
    said = "\n".join(server.lines)
    assert f"the tensor {norm} holds 1 infinite among its 64 values" in said


def test_a_batch_keeps_its_answers(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "m")
    (damaged,) = byte_tokenizer().encode("Q").ids
    change_tensor(folder, "lm_head.weight", lambda values: values[damaged].zero_())
    damage_token(folder, damaged)
    prompts = [{"prompt": "good"}, {"prompt": "Q is bad"}, {"prompt": "also good"}]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in prompts))
    command = ["run", "--input", str(source), "--output", str(target), "--model", str(folder), "--raw"]
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", *command, "--threads", "1", "--max-tokens", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(answers) == len(prompts)
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length"]
    assert done.returncode == 3, done.stderr
    assert EMBEDDING in answers[1]["error"]
    assert EMBEDDING in done.stderr
