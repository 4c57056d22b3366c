"""States of a tiny model: what is captured is what was generated, aligned as the contract says."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.drafter.answers import read_answers
from firstlight.drafter.capture import capture, default_layers, state_layers
from firstlight.drafter.capture_cost import measure_capture
from firstlight.drafter.gates import states_gate, teacher_gate
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.int8_states import from_int8, storage_error, to_int8
from firstlight.drafter.shards import NO_TOKEN, Shard, read_shard, write_shard
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target, open_target, read_ends
from support.drafters import SMALL_ENGINE, STATES, captured_run
from support.serving import write_chat_model

Run = tuple[Path, Target]
ANSWERS = GenerateSettings(max_tokens=24, shard_prompts=6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return captured_run(tmp_path_factory.mktemp("run"))


def first_shard(out: Path) -> tuple[Path, Shard]:
    path = out / "capture" / "states-00000.safetensors"
    return path, read_shard(path)


def test_every_answer_is_aligned_by_the_contract(run: Run) -> None:
    out, _ = run
    _, shard = first_shard(out)
    answers = read_answers(out / "generate", "answers-00000.jsonl")
    assert [document.id for document, _ in shard.spans()] == [answer.id for answer in answers]
    for answer, (_, span) in zip(answers, shard.spans(), strict=True):
        tokens = answer.prompt_token_ids + answer.token_ids
        num_prompt = len(answer.prompt_token_ids)
        assert shard.tokens[span].tolist() == tokens[1:]
        assert shard.predicted[span].tolist() == [*tokens[2:], NO_TOKEN]
        # The first draft follows the answer's first token, so it predicts the second.
        places = shard.supervised[span].nonzero().squeeze(1).tolist()
        assert places == list(range(num_prompt - 1, len(tokens) - 2))
        assert [shard.predicted[span][place] for place in places] == answer.token_ids[1:]


def test_the_last_state_gives_the_target_s_own_choices(run: Run) -> None:
    out, target = run
    _, shard = first_shard(out)
    gate = teacher_gate(shard, read_ends(target.checkpoint), target.checkpoint.description.norm_eps)
    assert gate.passed, gate.said


def test_states_are_those_of_the_reference(run: Run) -> None:
    out, target = run
    _, shard = first_shard(out)
    answers = read_answers(out / "generate", "answers-00000.jsonl")
    gate = states_gate(target, shard, answers)
    assert gate.passed, gate.said
    swapped = Shard(**{**vars(shard), "states": shard.states.flip(1)})
    gate = states_gate(target, swapped, answers)
    assert not gate.passed
    assert "the capture takes another layer" in gate.said


def test_one_pass_over_an_answer_has_the_states_of_its_decoding(run: Run, tmp_path: Path) -> None:
    """Row invariance: prefill in one step and decode in a batch give the same bits."""
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "capture")
    stage = capture(copy, target, STATES, threads=1)
    assert stage.manifest.complete
    assert stage.manifest.files == read_manifest(out / "capture").files


def test_stages_go_on_where_they_stopped(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    for folder in ("generate", "capture"):
        shutil.rmtree(copy / folder)
    generate(copy, target, ANSWERS, STATES, SMALL_ENGINE, max_shards=1)
    assert not read_manifest(copy / "generate").complete
    assert len(read_manifest(copy / "capture").files) == 1
    generate(copy, target, ANSWERS, STATES, SMALL_ENGINE)
    capture(copy, target, STATES, threads=1)
    for folder in ("generate", "capture"):
        assert read_manifest(copy / folder).complete
        assert read_manifest(copy / folder).files == read_manifest(out / folder).files


def test_a_file_that_was_written_but_not_recorded_is_made_again(run: Run, tmp_path: Path) -> None:
    """Killed between the rename of a shard and that of the manifest."""
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    manifest = read_manifest(copy / "generate")
    shutil.rmtree(copy / "generate")
    (copy / "generate").mkdir()
    (copy / "generate" / "answers-00000.jsonl").write_text("half a li")
    (copy / "generate" / ".answers-00001.jsonl.7.partial").write_text("x")
    generate(copy, target, ANSWERS, STATES, SMALL_ENGINE)
    assert read_manifest(copy / "generate").files == manifest.files


def test_another_target_is_refused(run: Run, tmp_path: Path) -> None:
    out, _ = run
    folder = write_chat_model(tmp_path / "tiny", architecture="qwen2")
    with pytest.raises(ModelFileError, match="weights differ"):
        capture(out, open_target(folder), STATES)


def test_layers_that_are_not_there_are_refused(run: Run) -> None:
    _, target = run
    assert default_layers(30) == (2, 15, 27)
    for layers in ((0, 0), (2,), (-1, 1)):
        with pytest.raises(UsageError, match="are not different states"):
            state_layers(target, layers)


def test_int8_halves_the_states_and_tells_its_error(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "capture")
    stage = capture(copy, target, msgspec.structs.replace(STATES, storage="int8"), threads=1)
    path, whole = first_shard(out)
    small, stored = first_shard(copy)
    assert small.stat().st_size < 0.75 * path.stat().st_size
    error = stage.manifest.numbers["storage_error"]
    assert max(error["relative"]) < 0.02
    assert min(error["lowest_cosine"]) > 0.99
    origin = whole.states.float()
    allowed = 0.5 * origin.abs().amax(0) / 127 + 2**-8 * origin.abs() + 1e-6
    assert ((stored.states.float() - origin).abs() <= 1.01 * allowed).all()
    for name in ("final", "tokens", "wanted", "supervised"):
        assert getattr(stored, name).equal(getattr(whole, name))
    with pytest.raises(UsageError, match="not stored as 'int4'"):
        capture(copy, target, msgspec.structs.replace(STATES, storage="int4"))


def test_rows_that_outlie_leave_the_others_their_bits() -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 2, 16).bfloat16()
    states[0] *= 500
    tensors = to_int8(states)
    assert tensors["exact_rows"].tolist() == [0]
    assert from_int8(tensors, Path("x"))[0].equal(states[0])
    assert max(storage_error(states)["relative"]) < 0.01
    del tensors["states_scale"]
    with pytest.raises(ModelFileError, match="states_scale is missing"):
        from_int8(tensors, Path("x"))


def test_sampled_answers_keep_what_the_target_would_choose(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    for folder in ("generate", "capture"):
        shutil.rmtree(copy / folder)
    sampled = msgspec.structs.replace(ANSWERS, temperature=1.0)
    generate(copy, target, sampled, STATES, SMALL_ENGINE)
    _, shard = first_shard(copy)
    asked = shard.supervised
    assert not shard.wanted[asked].equal(shard.predicted[asked])
    gate = teacher_gate(shard, read_ends(target.checkpoint), target.checkpoint.description.norm_eps)
    assert gate.passed, gate.said
    made = read_manifest(copy / "capture").files
    shutil.rmtree(copy / "capture")
    capture(copy, target, STATES, threads=1)
    assert read_manifest(copy / "capture").files == made


def test_what_capture_costs_is_measured(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    found = measure_capture(copy, target, STATES, threads=1)
    assert found["share_of_prefill"] > 0
    manifest = read_manifest(copy / "capture")
    assert manifest.complete
    assert manifest.numbers["share_of_prefill"] == found["share_of_prefill"]


def test_a_damaged_shard_is_named(run: Run, tmp_path: Path) -> None:
    path, shard = first_shard(run[0])
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelFileError, match="truncated"):
        read_shard(cut)
    states = shard.states.clone()
    states[3, 1, 5] = float("nan")
    write_shard(tmp_path / "nan.safetensors", Shard(**{**vars(shard), "states": states}))
    with pytest.raises(ModelFileError, match="not finite"):
        read_shard(tmp_path / "nan.safetensors")
    empty = Shard(**{**vars(shard), "final": torch.zeros_like(shard.final)})
    write_shard(tmp_path / "zero.safetensors", empty)
    with pytest.raises(ModelFileError, match="all zeros"):
        read_shard(tmp_path / "zero.safetensors")
    write_shard(tmp_path / "short.safetensors", Shard(**{**vars(shard), "tokens": shard.tokens[1:].clone()}))
    with pytest.raises(ModelFileError, match="the tensor tokens is"):
        read_shard(tmp_path / "short.safetensors")


def test_an_answer_that_repeats_itself_is_ended_when_it_does(tmp_path: Path) -> None:
    """A tiny random model repeats itself soon; its states are still those of its very tokens."""
    out, target = captured_run(tmp_path, num_prompts=6, max_tokens=96)
    answers = read_answers(out / "generate", "answers-00000.jsonl")
    looped = [answer for answer in answers if answer.finish_reason == "loop"]
    assert looped, "none of the tiny model's answers repeats itself: the test says nothing"
    for answer in looped:
        assert answer.cut_tokens > 0
        assert len(answer.token_ids) + answer.cut_tokens < 96
    _, shard = first_shard(out)
    assert [document.id for document, _ in shard.spans()] == [a.id for a in answers]
    # The end of the last answer is not taken for that of the next shard's first.
    apart = tmp_path / "apart"
    shutil.copytree(out / "prompts", apart / "prompts")
    generate(apart, target, GenerateSettings(max_tokens=96, shard_prompts=1), STATES, SMALL_ENGINE)
    names = sorted(read_manifest(apart / "generate").files)
    assert [read_answers(apart / "generate", name)[0].token_ids for name in names] == [
        answer.token_ids for answer in answers
    ]
