"""Faults of the checkpoint, the data and the training; two at once, and none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstlight.base.errors import UnsupportedError, UsageError
from firstlight.cli.drafter_explain import ExplainOptions
from firstlight.cli.drafter_explain import explain as run_command
from firstlight.drafter.explain.finding import Side
from firstlight.drafter.gates import unroll_gate
from firstlight.drafter.shards import read_shard
from firstlight.drafter.target import read_ends
from firstlight.drafter.train import train
from firstlight.drafter.train_settings import Limits
from firstlight.loading.tensor_file import read_tensor_file, write_tensor_file
from firstlight.models.eagle3_file import load_eagle3
from support import fault_plants as plants
from support.explaining import NUM_DOCUMENTS, causes, explain
from support.fault_runs import TRAINING, FaultRun, edit_config

pytestmark = pytest.mark.slow
Plant = Callable[[FaultRun], None]
PLANTED: dict[str, tuple[Plant, Side, str]] = {
    "1 layer ids": (plants.ids_one_lower, Side.INTEGRATION, "the layer ids are one too low"),
    "3 last state": (
        plants.last_state_one_block_off,
        Side.INTEGRATION,
        "the last state is of another block",
    ),
    "11 default of a flag": (
        plants.as_speculators,
        Side.INTEGRATION,
        "norm_before_residual is configured the wrong way",
    ),
    "20 rotary scaling": (
        plants.without_rope_scaling,
        Side.INTEGRATION,
        "the rotary scaling was dropped or is another",
    ),
    "26 empty mask": (plants.empty_mask, Side.DATA, "the loss mask is empty"),
    "27 late mask": (plants.late_mask, Side.DATA, "the loss mask is shifted"),
    "33 states": (plants.states_of_the_next_token, Side.DATA, "the stored states are of other rows"),
    "34 vocabulary": (plants.small_vocabulary, Side.TRAINING, "the draft vocabulary lacks tokens"),
}


def test_no_fault_is_fine(sound: FaultRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command itself, with two ranks, and a figure of a server that fits."""
    numbers = tmp_path / "numbers.json"
    options = ExplainOptions(
        folder=sound.folder,
        out=sound.out,
        target=str(sound.target.path),
        served_acceptance=4.0,
        tensor_parallel=2,
        documents=NUM_DOCUMENTS,
        json=numbers,
        threads=1,
        cpu_kernels="stock",
    )
    assert run_command(options) == 0
    text = capsys.readouterr().out
    assert text.startswith("Verdict: fine\n"), text
    values = json.loads(numbers.read_bytes())
    assert values["findings"] == []
    assert values["evidence"]["own_loop"]["acceptance_length"] > 2
    assert {match["stage"] for match in values["evidence"]["states"]} == {
        "stored",
        "prefill",
        "decode",
        "verify",
        "2 ranks",
    }


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_named(run: FaultRun, name: str) -> None:
    plant, side, cause = PLANTED[name]
    plant(run)
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (side, cause), causes(verdict)


def test_another_rendering_is_named(run: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 25."""
    plants.another_rendering(run, monkeypatch)
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (Side.TEMPLATE, "the prompts are rendered otherwise")
    assert "<think" in verdict.findings[0].evidence[1]


def test_a_training_that_sees_the_future_is_named(run: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 33, by the gate before training and by the explanation after it."""
    plants.leaking_mask(monkeypatch)
    shard, ends = read_shard(plants.shards(run)[0]), read_ends(run.target.checkpoint)
    assert not unroll_gate(run.target, shard, ends).passed
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (Side.TRAINING, "training sees the future"), causes(verdict)


def test_the_wrong_algorithm_does_not_load(run: FaultRun) -> None:
    """Fault 15, by the loader."""
    edit_config(run.folder, architectures=["LlamaForCausalLMEagle"])
    embedding = read_ends(run.target.checkpoint).embedding
    with pytest.raises(UnsupportedError, match="needs another algorithm"):
        load_eagle3(run.folder, run.target.checkpoint.description, embedding)
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (Side.INTEGRATION, "the checkpoint does not load")


def test_an_empty_mask_is_refused_by_training(run: FaultRun) -> None:
    """Fault 26, before an hour is spent."""
    plants.empty_mask(run)
    (run.out / "train" / "checkpoint.safetensors").unlink()
    with pytest.raises(UsageError, match="No token of the captured answers is supervised"):
        train(run.out, run.target, TRAINING, Limits())


def test_two_faults_at_once_are_both_named(run: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    plants.late_mask(run)
    plants.ids_one_lower(run)
    plants.prefix_without_keys(monkeypatch)
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (Side.DATA, "the loss mask is shifted")
    assert {
        "the layer ids are one too low",
        "draft keys of cached prefixes are missing",
    } <= set(causes(verdict)), causes(verdict)


def test_too_little_training_is_no_fault_of_the_engine(run: FaultRun) -> None:
    """Fault 29: weights that have learned nothing, served as they are."""
    path = run.folder / "model.safetensors"
    tensors = read_tensor_file(path)
    torch.manual_seed(0)
    for name, values in tensors.items():
        if values.dim() == 2:
            tensors[name] = (torch.randn(values.shape) * 0.02).to(values.dtype)
    write_tensor_file(path, tensors, {})
    verdict = explain(run)
    assert (verdict.side, verdict.cause) == (
        Side.TRAINING,
        "the drafter is not as good as its training said",
    ), causes(verdict)
