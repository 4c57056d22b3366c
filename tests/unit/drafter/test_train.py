"""Training on a tiny model: rows, loss, resuming, vocabulary, and that one answer can be learnt by heart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.drafter import curves
from firstlight.drafter.capture import capture
from firstlight.drafter.chain import Rounds, ngram_proposer, run_chain
from firstlight.drafter.checkpoints import load_drafter
from firstlight.drafter.evaluate import bootstrap, evaluate, read_report
from firstlight.drafter.evaluate_settings import EvaluateSettings
from firstlight.drafter.gates import overfit_gate, unroll_gate
from firstlight.drafter.make_drafter import (
    build_vocabulary,
    coverage,
    initialise,
    new_drafter,
    renew_vocabulary,
)
from firstlight.drafter.objective import make_teacher, unrolled
from firstlight.drafter.packing import rows_of
from firstlight.drafter.prompts import TRAIN
from firstlight.drafter.shards import Shard, read_shard, write_shard
from firstlight.drafter.stages import MANIFEST, read_manifest
from firstlight.drafter.target import Ends, Target, read_ends
from firstlight.drafter.train import CHECKPOINT, Trainer, train
from firstlight.drafter.train_settings import Limits, TrainSettings, require_device
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_file import save_eagle3
from support.drafters import STATES, captured_run, random_drafter
from support.fault_plants import record

SETTINGS = TrainSettings(
    draft_vocab_size=60, epochs=2, row_tokens=96, rows_per_step=2, learning_rate=2e-3, warmup_share=0.1
)
Run = tuple[Path, Target]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return captured_run(tmp_path_factory.mktemp("run"))


def shards(out: Path) -> list[Path]:
    return [out / "capture" / name for name in sorted(read_manifest(out / "capture").files)]


def test_packed_documents_do_not_see_each_other(run: Run) -> None:
    out, target = run
    ends = read_ends(target.checkpoint)
    drafter = new_drafter(target, ends, shards(out), SETTINGS).drafter
    torch.nn.init.normal_(drafter.o_proj.weight, std=0.1)
    teacher = make_teacher(ends, drafter.target_ids_R, target.checkpoint.description.norm_eps)
    shard = read_shard(shards(out)[0])
    rows = list(rows_of(shard, 10_000, lambda document: True))
    assert len(rows) == 1
    alone = list(rows_of(shard, 1, lambda document: True))
    assert len(alone) == len(shard.contract.documents)
    with torch.no_grad():
        together = unrolled(drafter, teacher, rows[0], 3, 1.0)
        apart = [unrolled(drafter, teacher, row, 3, 1.0) for row in alone]
    assert together.valid_SQ.equal(torch.cat([outcome.valid_SQ for outcome in apart], 1))
    assert together.correct_SQ.equal(torch.cat([outcome.correct_SQ for outcome in apart], 1))


def test_training_that_was_interrupted_ends_as_if_it_was_not(run: Run, tmp_path: Path) -> None:
    out, target = run
    copies = [tmp_path / name for name in ("whole", "parts")]
    for copy in copies:
        shutil.copytree(out, copy)
    train(copies[0], target, SETTINGS, Limits())
    for _ in range(50):
        stage = train(copies[1], target, SETTINGS, Limits(max_optimizer_steps=1))
        if stage.manifest.complete:
            break
    embedding = read_ends(target.checkpoint).embedding
    whole, parts = (load_drafter(copy / "train" / CHECKPOINT, embedding) for copy in copies)
    assert whole[1].step == parts[1].step > 3
    for (name, first), (_, second) in zip(
        whole[0].named_parameters(), parts[0].named_parameters(), strict=True
    ):
        assert first.equal(second), name
    assert (copies[0] / "train" / "curves.json").exists()
    assert (copies[0] / "train" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_longer_training_learns(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    settings = msgspec.structs.replace(SETTINGS, epochs=25)
    train(copy, target, settings, Limits(report_every_steps=4))
    points = load_drafter(copy / "train" / CHECKPOINT, read_ends(target.checkpoint).embedding)[1].training
    # The target's own entropy is most of the loss, so that the last few tokens' may be any.
    assert points[-1].acceptance_length > points[0].acceptance_length
    evaluate(copy, target, EvaluateSettings(num_drafts=2))
    report = read_report(copy)
    groups = {(line.drafter, line.group) for line in report.lines}
    assert {name for name, _ in groups} == {"eagle3", "untrained", "n-gram"}
    for line in report.lines:
        assert line.k == 2
        assert 1.0 <= line.low <= line.acceptance_length + 1e-9 <= line.high + 2e-9 <= 3.0 + 2e-9
        assert line.by_position[1] <= line.by_position[0]


def test_the_gates_open_on_a_sound_run(run: Run) -> None:
    out, target = run
    ends = read_ends(target.checkpoint)
    shard = read_shard(shards(out)[0])
    for gate in (unroll_gate(target, shard, ends), overfit_gate(target, shard, ends)):
        assert gate.passed, gate.said


def test_a_mask_without_a_supervised_token_is_said(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    for path in shards(copy):
        shard = read_shard(path)
        write_shard(path, Shard(**{**vars(shard), "supervised": torch.zeros_like(shard.supervised)}))
        record(path)
    with pytest.raises(UsageError, match="No token of the captured answers is supervised"):
        Trainer(copy, target, SETTINGS, Limits())


def test_a_damaged_checkpoint_is_named_and_states_must_be_there(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    train(copy, target, SETTINGS, Limits(max_optimizer_steps=1))
    path = copy / "train" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match="truncated"):
        train(copy, target, SETTINGS, Limits())
    (copy / "capture" / MANIFEST).unlink()
    with pytest.raises(UsageError, match="has not run"):
        train(copy, target, SETTINGS, Limits())


def test_states_that_arrive_later_join_the_next_epoch(run: Run, tmp_path: Path) -> None:
    out, target = run
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "capture")

    capture(copy, target, STATES, threads=1, max_shards=1)
    train(copy, target, SETTINGS, Limits(max_optimizer_steps=1))
    capture(copy, target, STATES, threads=1)
    stage = train(copy, target, SETTINGS, Limits())
    assert stage.manifest.complete


def test_the_vocabulary_keeps_what_it_must() -> None:
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 5, 0])
    ids = build_vocabulary(counts, 5, always=[7])
    assert ids.tolist() == [1, 3, 4, 6, 7]
    assert build_vocabulary(counts, 6, always=[7]).tolist() == [0, 1, 3, 4, 6, 7]
    assert coverage(counts, ids) == 1.0
    with pytest.raises(UsageError, match="does not fit a target with 8 tokens"):
        build_vocabulary(counts, 9, always=[])


def test_the_chain_counts_rounds_as_an_engine_does() -> None:
    tokens = [4, 5, 6, 7, 8, 9, 10]

    def perfect(index: int, k: int) -> list[int]:
        return tokens[index + 1 : index + 1 + k]

    assert run_chain(tokens, 0, 2, perfect) == Rounds(2, 6, (2, 2))
    assert run_chain(tokens, 0, 2, lambda index, k: [0, 0]) == Rounds(6, 6, (0, 0))
    half = run_chain(tokens, 0, 2, lambda index, k: [tokens[index + 1], 0])
    assert half == Rounds(3, 6, (3, 0))
    assert half.acceptance_length == 2.0
    repeated = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert run_chain(repeated, 4, 3, ngram_proposer(repeated)).acceptance_length > 2


def test_the_interval_holds_the_pooled_length() -> None:
    results = [Rounds(10, 10 + n, (n,)) for n in range(10)]
    low, high = bootstrap(results, seed=0)
    assert low < 1.45 < high


def trained(out: Path, target: Target, copy: Path, limits: Limits, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights after a training in a copy of the run."""
    shutil.copytree(out, copy)
    train(copy, target, msgspec.structs.replace(SETTINGS, **changes), limits)
    drafter = load_drafter(copy / "train" / CHECKPOINT, read_ends(target.checkpoint).embedding)[0]
    return dict(drafter.named_parameters())


def test_two_ranks_train_what_one_does(run: Run, tmp_path: Path) -> None:
    out, target = run
    one = trained(out, target, tmp_path / "one", Limits(max_optimizer_steps=3))
    two = trained(out, target, tmp_path / "two", Limits(max_optimizer_steps=3, num_ranks=2))
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=1e-3, atol=1e-4, msg=name)


def test_in_bfloat16_and_by_another_loss_it_learns_too(run: Run, tmp_path: Path) -> None:
    out, target = run
    for name, changes in {"narrow": {"dtype": "bfloat16"}, "lk": {"loss": "lk-lambda"}}.items():
        trained(out, target, tmp_path / name, Limits(report_every_steps=4), epochs=12, **changes)
        points = load_drafter(tmp_path / name / "train" / CHECKPOINT, read_ends(target.checkpoint).embedding)[
            1
        ].training
        assert points[-1].acceptance_length > points[0].acceptance_length
    with pytest.raises(UsageError, match="not in 'float16'"):
        trained(out, target, tmp_path / "half", Limits(), dtype="float16")


def test_minutes_end_a_training_at_a_low_rate(run: Run, tmp_path: Path) -> None:
    out, target = run
    trained(out, target, tmp_path / "run", Limits(report_every_steps=1), epochs=10_000, max_minutes=0.01)
    (*_, last) = load_drafter(
        tmp_path / "run" / "train" / CHECKPOINT, read_ends(target.checkpoint).embedding
    )[1].training
    assert last.learning_rate < 0.3 * SETTINGS.learning_rate
    assert read_manifest(tmp_path / "run" / "train").complete


def test_a_training_may_start_from_a_drafter(run: Run, tmp_path: Path) -> None:
    out, target = run
    first = trained(out, target, tmp_path / "first", Limits(max_optimizer_steps=2))
    drafter = load_drafter(tmp_path / "first" / "train" / CHECKPOINT, read_ends(target.checkpoint).embedding)[
        0
    ]
    save_eagle3(tmp_path / "drafter", drafter, torch.float32)
    begun = trained(
        out,
        target,
        tmp_path / "warm",
        Limits(max_optimizer_steps=1),
        init_from=str(tmp_path / "drafter"),
        learning_rate=0.0,
    )
    assert all(begun[name].equal(values) for name, values in first.items())
    other = random_drafter(vocab_size=target.checkpoint.description.vocab_size)
    save_eagle3(tmp_path / "other", other, torch.float32)
    with pytest.raises(ModelFileError):
        trained(out, target, tmp_path / "wrong", Limits(), init_from=str(tmp_path / "other"))


def test_a_warm_start_learns_tokens_that_the_data_has() -> None:
    torch.manual_seed(0)
    ends = Ends(torch.randn(300, 32), torch.ones(32), torch.randn(300, 32))
    drafter = random_drafter(vocab_size=300, draft_vocab_size=50)
    turn_HH = torch.randn(32, drafter.config.hidden_size)
    held = torch.randperm(300)[:50]  # foreign drafters need not have them in order
    drafter.target_ids_R.copy_(held)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(ends.head[held] @ turn_HH)
    outside = [token for token in range(300) if token not in held.tolist()]
    counts = torch.zeros(300, dtype=torch.int64)
    counts[held[:45]] = 3
    counts[outside[-2:]] = 1
    assert renew_vocabulary(drafter, ends, counts, set()) == 2
    ids = drafter.target_ids_R
    assert set(held[:45].tolist()) | set(outside[-2:]) <= set(ids.tolist()), "seen ones are all in it"
    assert drafter.lm_head.weight.allclose(ends.head[ids] @ turn_HH, atol=1e-3)
    before = drafter.lm_head.weight.clone()
    assert renew_vocabulary(drafter, ends, counts, set()) == 0
    assert drafter.lm_head.weight.equal(before)


def test_tensorboard_that_is_missing_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, target = run
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package tensorboard"):
        trained(out, target, tmp_path / "run", Limits(tensorboard=True))


def test_first_weights_know_something_already(run: Run) -> None:
    out, target = run
    ends = read_ends(target.checkpoint)
    fitted = new_drafter(target, ends, shards(out), SETTINGS).drafter
    plain = Eagle3Drafter(fitted.config, ends.embedding)
    plain.target_ids_R.copy_(fitted.target_ids_R)
    initialise(plain, ends)
    teacher = make_teacher(ends, fitted.target_ids_R, target.checkpoint.description.norm_eps)
    (row, *_) = rows_of(read_shard(shards(out)[0]), 10_000, lambda document: document.split == TRAIN)
    with torch.no_grad():
        losses = [float(unrolled(drafter, teacher, row, 3, 1.0).losses_S[0]) for drafter in (fitted, plain)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("device", ["tpu", "cuda:7"])
def test_a_device_that_is_not_here_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=device):
        require_device(device)
