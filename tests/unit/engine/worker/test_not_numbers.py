"""Logits that are not numbers: who is touched, who is not, and what is said of the weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.base.errors import EngineError, ModelFileError
from firstlight.engine.messages import NOT_NUMBERS, Submit
from firstlight.engine.speculation.ngram import NgramDrafter
from firstlight.engine.worker.not_numbers import Inspection, gave_up
from firstlight.engine.worker.startup import quiet, require_numbers, self_test
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.description import ModelDescription
from firstlight.models.random_model import Unpacked, write_random_model
from support.checkpoints import tiny_description
from support.damaged import EMBEDDING, change_tensor, damage_token, overflow_token
from support.eagle3 import SIZES as EAGLE3_SIZES
from support.eagle3 import write_pair
from support.engines import Harness, submit
from support.experts import description_of, kimi

BAD = 61
MODELS: dict[str, ModelDescription] = {
    "llama": tiny_description(),
    "window in a layer": tiny_description("mistral", sliding_window=24, full_layers=(1,)),
    "experts": description_of("mixtral"),
    "latent attention": kimi(vocab_size=96),
}
GOOD = [
    submit("short", [5, 6, 8, 9], max_tokens=30, ignore_eos=True),
    submit("long", [10, 11] * 40, max_tokens=30, ignore_eos=True),
    submit(
        "sampled",
        [20, 21, 22],
        max_tokens=30,
        ignore_eos=True,
        temperature=1.0,
        top_p=0.9,
        logit_bias={BAD: -100.0},
    ),
]
LATER = submit("later", [12, 13, 14] * 20, max_tokens=20, ignore_eos=True)
DAMAGED = [submit("bad", [3, BAD, 4] * 20), submit("bad too", [3, 5, 9, BAD] * 17, temperature=1.0)]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with a token whose embedding is NaN."""
    folder = tmp_path_factory.mktemp("models")
    sound = write_random_model(folder / "sound", MODELS[request.param], Unpacked(torch.float32))
    # What is said by itself must not be the damaged token: its row of the head is far from every state.
    head = EMBEDDING if MODELS[request.param].tie_embeddings else "lm_head.weight"
    change_tensor(sound, head, lambda values: values[BAD].zero_())
    shutil.copytree(sound, folder / "damaged")
    return sound, damage_token(folder / "damaged", BAD)


BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"dtype": "float32"},
    "native": {"dtype": "auto", "cpu_kernels": "native"},
}


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_request_costs_the_others_nothing(pair: tuple[Path, Path], backend: str, drafts: int) -> None:
    """Beside it, before it and after it in the same pages: bit for bit what they give without it."""
    sound, damaged = (Harness(path, **BACKENDS[backend]) for path in pair)
    expected = sound.run(GOOD, arrive={5: [LATER]})
    if drafts:
        damaged.fresh(NgramDrafter(), drafts)
    results = damaged.run([DAMAGED[0], *GOOD, DAMAGED[1]], arrive={5: [LATER]})
    for item in DAMAGED:
        result = results[item.request_id]
        assert (result.finish_reason, result.error, result.tokens) == ("error", NOT_NUMBERS, [])
    for name, result in expected.items():
        assert results[name].same_bits(result), name
    assert damaged.core.scheduler.stats().num_not_numbers == 2


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_prompt_that_overflows_ends_alone(tmp_path: Path, drafts: int) -> None:
    """All weights are numbers: it is this prompt, and nothing else."""
    folder = write_random_model(tmp_path / "m", MODELS["llama"], Unpacked(torch.float32))
    change_tensor(folder, "lm_head.weight", lambda values: values[BAD].zero_())
    engine = Harness(overflow_token(folder, BAD), **BACKENDS["native"])
    expected = engine.run(GOOD, arrive={5: [LATER]})
    engine.fresh(NgramDrafter() if drafts else None, drafts)
    results = engine.run([DAMAGED[0], *GOOD, DAMAGED[1]], arrive={5: [LATER]})
    assert {results[item.request_id].error for item in DAMAGED} == {NOT_NUMBERS}
    for name, result in expected.items():
        assert results[name].same_bits(result), name
    inspection = Inspection(engine.started.checkpoint)
    assert "though all weights of the model are numbers" in inspection.explain(NOT_NUMBERS)
    assert inspection.fault is None


def test_a_draft_that_is_no_number_costs_nothing(pair: tuple[Path, Path]) -> None:
    """The damaged token is drafted, and is not what the model says: the row before it counts."""

    class Wrong(NgramDrafter):
        def propose(self, sequences: Any, num: int) -> list[list[int]]:
            return [[BAD] * num for _ in sequences]

    sound, damaged = (Harness(path) for path in pair)
    expected = sound.run(GOOD)
    damaged.fresh(Wrong(), 3)
    results = damaged.run(GOOD)
    assert all(results[name].same_bits(result) for name, result in expected.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drafter_that_saw_no_numbers_drafts_on_for_the_others(tmp_path: Path, backend: str) -> None:
    """EAGLE-3 takes the target's states of all sequences at once, the damaged one's among them."""
    sound, drafter = write_pair(tmp_path)
    change_tensor(sound, "lm_head.weight", lambda values: values[BAD].zero_())
    shutil.copytree(sound, tmp_path / "damaged")
    damage_token(tmp_path / "damaged", BAD)
    sizes = {**BACKENDS[backend], **EAGLE3_SIZES}
    expected = Harness(sound, **sizes).run(GOOD)
    results = Harness(tmp_path / "damaged", drafter=str(drafter), **sizes).run([*DAMAGED, *GOOD])
    assert {results[item.request_id].error for item in DAMAGED} == {NOT_NUMBERS}
    for name, result in expected.items():
        assert results[name].same_bits(result), name


def test_the_self_test_names_tensor_and_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "m")
    folder = change_tensor(tmp_path / "m", "model.norm.weight", lambda values: values[:3].fill_(torch.inf))
    started = Harness(folder).started
    seen: list[tuple[Any, ...]] = []
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight holds 3 infinite among its 64") as caught:
        self_test(
            started.core(started.runner.run),
            Inspection(started.checkpoint),
            lambda *entry: seen.append(entry),
        )
    assert str(folder / "model.safetensors") in str(caught.value)
    assert caught.value.exit_code == 3
    assert {entry[0] for entry in seen} == {"self-test"}


def test_a_start_that_met_them_later_names_them_too(pair: tuple[Path, Path]) -> None:
    engine = Harness(pair[1])
    engine.run(DAMAGED)
    with pytest.raises(ModelFileError, match=EMBEDDING):
        require_numbers(engine.core, Inspection(engine.started.checkpoint), quiet)


def test_sound_weights_are_not_blamed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "m")
    folder = change_tensor(tmp_path / "m", "model.norm.weight", lambda values: values.fill_(3e38))
    started = Harness(folder).started
    with pytest.raises(EngineError, match="all weights of the model are numbers") as caught:
        self_test(started.core(started.runner.run), Inspection(started.checkpoint), quiet)
    assert "--dtype float32" in caught.value.hint


def test_the_weights_are_looked_at_once(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from firstlight.engine.worker import not_numbers

    looks: list[int] = []
    real = not_numbers.find_not_finite
    monkeypatch.setattr(
        not_numbers, "find_not_finite", lambda *arguments: looks.append(1) or real(*arguments)
    )
    inspection = Inspection(open_checkpoint(pair[1]))
    assert EMBEDDING in inspection.explain(NOT_NUMBERS)
    assert EMBEDDING in inspection.explain(NOT_NUMBERS)
    inspection.begin(lambda: None)
    assert inspection.explain("another error") == "another error"
    assert looks == [1]


def test_who_needs_every_answer_is_told_why_one_is_lost(pair: tuple[Path, Path]) -> None:
    sound, damaged = map(open_checkpoint, pair)
    bad = gave_up(damaged, NOT_NUMBERS, "a remedy")
    assert (bad.exit_code, EMBEDDING in str(bad)) == (3, True)
    overflow = gave_up(sound, NOT_NUMBERS, "a remedy")
    assert (overflow.exit_code, "all weights of the model are numbers" in str(overflow)) == (6, True)
    assert "--dtype float32" in overflow.hint
    other = gave_up(damaged, "queue full", "a remedy")
    assert (str(other), other.hint) == ("the engine gave up a request: queue full.", "a remedy")


def test_a_closed_engine_takes_nothing_new_and_finishes_what_it_has(pair: tuple[Path, Path]) -> None:
    engine = Harness(pair[0])

    def close(step: int) -> None:
        if step == 3:
            engine.core.closed = "the reason"

    results = engine.run(GOOD, arrive={5: [LATER]}, before_step=close)
    assert (results["later"].finish_reason, results["later"].error) == ("error", "the reason")
    assert {results[item.request_id].finish_reason for item in GOOD} == {"length"}
    assert isinstance(LATER, Submit)
