"""EngineCore: every request ends once, errors stay with their sequence, logprobs belong to their token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.base.errors import EngineError
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, Drain, SequenceOutput, Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.scheduler import Scheduler
from firstlight.engine.worker.not_numbers import Inspection
from firstlight.engine.worker.startup import quiet, self_test
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from support.checkpoints import random_weights, tiny_description, write_hf_folder

VOCABULARY = 16
END = 15


def successor_logits(plan: StepPlan) -> torch.Tensor:
    """A model that says t + 1 after t, and NaN after 9."""
    tokens = torch.tensor(plan.tokens)[plan.samples]
    logits = torch.zeros(len(plan.samples), VOCABULARY)
    logits[torch.arange(len(tokens)), (tokens + 1) % VOCABULARY] = 5.0
    logits[tokens == 9] = torch.nan
    return logits


def make_core() -> EngineCore:
    section = EngineSection(max_num_seqs=4, max_batched_tokens=8, max_model_len=32, page_size_tokens=4)
    return EngineCore(Scheduler(section, 33, [END]), successor_logits)


def submit(name: str, prompt: list[int], **params: object) -> Submit:
    return Submit(name, prompt, SamplingParams(**{"temperature": 0.0, "seed": 0, **params}))  # type: ignore[arg-type]


def run(core: EngineCore) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    while True:
        step = core.step()
        if step is None:
            return outputs
        for output in step.outputs:
            outputs.setdefault(output.request_id, []).append(output)


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_requests_run_together_to_their_ends() -> None:
    core = make_core()
    core.handle(submit("a", [10]))
    core.handle(submit("b", [0, 1, 2], max_tokens=2))
    outputs = run(core)
    assert tokens_of(outputs["a"]) == [11, 12, 13, 14, END]
    assert tokens_of(outputs["b"]) == [3, 4]
    assert [o.finish_reason for o in outputs["a"]] == [None] * 4 + ["stop"]
    assert not core.has_work


def test_a_chunk_that_samples_nothing_gives_no_output() -> None:
    core = make_core()
    core.handle(submit("a", [1] * 20, max_tokens=1))
    steps = [core.step() for _ in range(3)]
    assert [len(step.outputs) if step else None for step in steps] == [0, 0, 1]
    assert core.step() is None


def test_logits_that_are_not_numbers_end_one_sequence_alone() -> None:
    core = make_core()
    core.handle(submit("bad", [8]))
    core.handle(submit("good", [0], max_tokens=5))
    outputs = run(core)
    assert tokens_of(outputs["bad"]) == [9]
    assert outputs["bad"][-1].finish_reason == "error"
    assert tokens_of(outputs["good"]) == [1, 2, 3, 4, 5]


def test_logprobs_go_to_the_sequence_that_asked() -> None:
    core = make_core()
    core.handle(submit("plain", [0], max_tokens=3))
    core.handle(submit("asked", [4], max_tokens=3, logprobs=2))
    outputs = run(core)
    assert all(output.logprobs is None for output in outputs["plain"])
    for output in outputs["asked"]:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert output.logprobs[0].rank == 1
        assert len(output.logprobs[0].top) == 2


def test_logprobs_go_past_a_chunk_that_samples_nothing() -> None:
    section = EngineSection(max_num_seqs=4, max_batched_tokens=64, max_model_len=128, page_size_tokens=4)
    core = EngineCore(Scheduler(section, 65, [END]), successor_logits)
    core.handle(submit("long", [1] * 100, max_tokens=1))
    core.handle(submit("asked", [4], max_tokens=1, logprobs=1))
    step = core.step()
    assert step is not None
    (output,) = step.outputs
    assert output.request_id == "asked"
    assert output.logprobs is not None
    assert output.logprobs[0].token_id == output.token_ids[0] == 5


def test_rejected_and_aborted_requests_are_in_the_next_outputs() -> None:
    core = make_core()
    core.handle(submit("empty", []))
    core.handle(submit("gone", [1]))
    core.handle(Abort(["gone", "unknown"]))
    core.handle(Drain(1.0))
    step = core.step()
    assert step is not None
    assert {o.request_id: o.finish_reason for o in step.outputs} == {"empty": "rejected", "gone": "abort"}
    assert core.step() is None


def test_stats_count_the_step() -> None:
    core = make_core()
    core.handle(submit("a", [1, 2, 3], max_tokens=2))
    step = core.step()
    assert step is not None
    stats = step.stats
    assert (stats.num_running, stats.num_steps, stats.step_tokens, stats.step_sequences) == (1, 1, 3, 1)
    assert stats.pages_used == 1
    assert stats.step_s > 0


def inspection(folder: Path) -> Inspection:
    """Of a sound model."""
    description = tiny_description()
    return Inspection(open_checkpoint(write_hf_folder(folder, description, random_weights(description))))


def test_the_self_test_leaves_nothing_behind(tmp_path: Path) -> None:
    core = make_core()
    self_test(core, inspection(tmp_path / "m"), quiet)
    assert not core.has_work
    assert core.scheduler.prefix.num_available == 32


def test_the_self_test_fails_on_a_broken_model(tmp_path: Path) -> None:
    section = EngineSection(max_num_seqs=4, max_batched_tokens=8, max_model_len=32, page_size_tokens=4)
    core = EngineCore(Scheduler(section, 33, []), lambda plan: torch.full((1, VOCABULARY), torch.nan))
    with pytest.raises(EngineError, match="self-test failed: the model's logits are not numbers"):
        self_test(core, inspection(tmp_path / "m"), quiet)
