"""What can go wrong with files that hold hours of work: a clear error, and nothing finished is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from firstlight.base.errors import FirstlightError, ModelFileError, ResourceError, UsageError
from firstlight.drafter.answers import read_answers
from firstlight.drafter.capture import capture
from firstlight.drafter.checkpoints import load_drafter
from firstlight.drafter.evaluate import evaluate
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.export import export
from firstlight.drafter.generate import GenerateSettings, generate
from firstlight.drafter.shards import read_shard, write_shard
from firstlight.drafter.stages import read_manifest
from firstlight.drafter.target import Target, open_target, read_ends
from firstlight.drafter.train import CHECKPOINT, train
from firstlight.drafter.train_settings import Limits, TrainSettings
from support.drafters import SMALL_ENGINE, STATES, captured_run
from support.serving import write_chat_model

Run = tuple[Path, Target]
ANSWERS = GenerateSettings(max_tokens=24, shard_prompts=6)
SETTINGS = TrainSettings(draft_vocab_size=60, epochs=1, row_tokens=96, rows_per_step=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out, target = captured_run(tmp_path_factory.mktemp("run"))
    train(out, target, SETTINGS, Limits())
    return out, target


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run", made[1]


@contextmanager
def full_disk(left_bytes: int) -> Iterator[None]:
    """No file may become longer than this: the write fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def states(out: Path) -> list[Path]:
    return sorted((out / "capture").glob("states-*.safetensors"))


def explained(error: FirstlightError, *words: str) -> None:
    """It names the thing, and what to do."""
    assert error.hint
    for word in words:
        assert word in error.explain(), error.explain()


def test_a_shard_with_a_flipped_bit_is_named(run: Run) -> None:
    out, target = run
    path = states(out)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_shard(path)
    explained(caught.value, path.name, "damaged", "Remove", "run the stage again")
    path.unlink()
    capture(out, target, STATES, threads=1)
    assert read_shard(path).contract.layers == STATES.layers


def test_a_damaged_shard_of_answers_is_named(run: Run) -> None:
    out, _ = run
    path = out / "generate" / "answers-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelFileError) as caught:
        read_answers(path.parent, path.name)
    explained(caught.value, path.name, "generate")


def test_another_target_is_refused_by_every_stage_behind(run: Run, tmp_path: Path) -> None:
    out, _ = run
    other = open_target(write_chat_model(tmp_path / "other", architecture="qwen2"))
    for stage in (
        lambda: generate(out, other, ANSWERS, STATES, SMALL_ENGINE),
        lambda: capture(out, other, STATES),
        lambda: train(out, other, SETTINGS, Limits()),
        lambda: evaluate(out, other, EvaluateSettings()),
        lambda: export(out, other),
    ):
        with pytest.raises(ModelFileError) as caught:
            stage()
        explained(caught.value, "weights differ", "Use the model it was made with")


def test_a_full_disk_stops_generation_and_loses_nothing(run: Run) -> None:
    out, target = run
    finished = dict(read_manifest(out / "generate").files)
    for stage in ("generate", "capture"):
        manifest = read_manifest(out / stage)
        last = max(manifest.files)
        (out / stage / last).unlink()
    with full_disk(1024), pytest.raises(ResourceError) as caught:
        generate(out, target, ANSWERS, STATES, SMALL_ENGINE)
    explained(caught.value, "answers-00001.jsonl", "cannot be written", "Make room")
    assert not list((out / "generate").glob(".*partial"))
    assert (out / "generate" / "answers-00000.jsonl").exists()
    generate(out, target, ANSWERS, STATES, SMALL_ENGINE)
    capture(out, target, STATES, threads=1)
    assert read_manifest(out / "generate").files == finished
    assert len(states(out)) == 2


def test_a_full_disk_stops_capture_and_loses_nothing(run: Run) -> None:
    out, target = run
    states(out)[1].unlink()
    first = states(out)[0].read_bytes()
    with full_disk(4096), pytest.raises(ResourceError) as caught:
        capture(out, target, STATES, threads=1)
    explained(caught.value, "states-00001", "Make room")
    assert [path.read_bytes() for path in states(out)] == [first]
    capture(out, target, STATES, threads=1)
    assert len(states(out)) == 2


def test_a_full_disk_stops_training_and_the_last_checkpoint_stays(run: Run) -> None:
    out, target = run
    embedding = read_ends(target.checkpoint).embedding
    shutil.rmtree(out / "train")
    train(out, target, SETTINGS, Limits(max_optimizer_steps=1))
    with full_disk(4096), pytest.raises(ResourceError) as caught:
        train(out, target, SETTINGS, Limits(max_optimizer_steps=1))
    explained(caught.value, CHECKPOINT, "Make room")
    assert load_drafter(out / "train" / CHECKPOINT, embedding)[1].step == 1
    assert train(out, target, SETTINGS, Limits()).manifest.complete


def test_a_process_that_is_killed_while_it_writes_leaves_the_file_that_was_there(run: Run) -> None:
    out, target = run
    path = states(out)[0]
    before, shard = path.read_bytes(), read_shard(path)
    child = os.fork()
    if not child:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_shard(path, shard)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert list(path.parent.glob(".*partial"))
    assert len(capture(out, target, STATES, threads=1).manifest.files) == 2


def test_a_stage_that_has_not_run_says_which_command_is_missing(tmp_path: Path, made: Run) -> None:
    with pytest.raises(UsageError) as caught:
        capture(tmp_path, made[1], STATES)
    explained(caught.value, "has not run", "firstlight drafter generate")
