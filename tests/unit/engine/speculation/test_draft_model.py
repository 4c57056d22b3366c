"""A draft model in the engine: the target as its own drafter guesses every greedy token, always.

So a key that is missing, stale or of another text shows as a draft that is wrong. Prefixes are shared, chunks
cut, pages evicted, sequences preempted, and pages written while nobody drafted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from firstlight.base.config import EngineSection
from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.engine.messages import Submit
from firstlight.engine.speculation.make import read_drafting
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from support.checkpoints import random_weights, write_hf_folder
from support.damaged import change_tensor
from support.engines import Harness, Result, submit
from support.serving import write_chat_model

SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_batched_tokens": 48, "page_size_tokens": 4}
SHARED = [5 + (7 * n) % 90 for n in range(30)]
WORKLOAD = [
    submit("one", SHARED[:1], max_tokens=13, ignore_eos=True),
    submit("short", SHARED[:6], max_tokens=20, ignore_eos=True),
    submit("pages", SHARED[:16], max_tokens=20, ignore_eos=True),
    submit("long", [*SHARED, *SHARED[2:29], *SHARED], max_tokens=20, ignore_eos=True),
    submit("fork", [*SHARED[:16], 99, 98], max_tokens=20, ignore_eos=True),
    *(submit(f"n{n}", [n + 3, *SHARED[: 9 + n]], max_tokens=24, ignore_eos=True) for n in range(4)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens and other weights."""
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "other")
    description = open_checkpoint(folder).description
    return write_hf_folder(folder, description, random_weights(description, seed=7))


@pytest.fixture(scope="module", params=["float32", "auto"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(model: Path, dtype: str) -> dict[str, Result]:
    return Harness(model, dtype=dtype, cpu_kernels="native", **SIZES).run(WORKLOAD)


def drafting(model: Path, dtype: str, drafter: Path, **sizes: Any) -> Harness:
    options = {"drafter": str(drafter), "draft_tokens": 3, "draft_adapt": False, "cpu_kernels": "native"}
    return Harness(model, dtype=dtype, **{**SIZES, **options, **sizes})


def assert_all_guessed(engine: Harness, workload: list[Submit], answers: dict[str, Result]) -> None:
    results = engine.run(workload)
    assert [name for name in results if not results[name].same_bits(answers[name])] == []
    assert engine.core.speculation is not None
    counts = engine.core.speculation.counts
    # Drafts behind a sequence's length are cut, so all that are verified must be right.
    assert sum(counts.drafted) > 2 * len(workload)
    assert counts.accepted == counts.drafted


@pytest.mark.parametrize(
    "sizes",
    [{}, {"max_batched_tokens": 6}, {"max_num_seqs": 1}, {"prefix_cache": False}, {"page_size_tokens": 16}],
    ids=str,
)
def test_it_guesses_all_that_it_would_say_itself(
    model: Path, dtype: str, answers: dict[str, Result], sizes: dict[str, Any]
) -> None:
    engine = drafting(model, dtype, model, **sizes)
    assert_all_guessed(engine, WORKLOAD, answers)
    assert_all_guessed(engine, WORKLOAD, answers)  # from the cache


def test_preempted_and_evicted(model: Path, dtype: str, answers: dict[str, Result]) -> None:
    page_bytes = 2 * 2 * (2 * 2 * 16 * 4) * (4 if dtype == "float32" else 2)  # of target and drafter
    engine = drafting(model, dtype, model, kv_memory_bytes=36 * page_bytes, max_model_len=120)
    assert engine.started.num_pages == 37
    for _ in range(3):
        assert_all_guessed(engine, WORKLOAD, answers)
    assert engine.core.scheduler.stats().num_preemptions > 2


def test_pages_written_while_nobody_drafted(model: Path, dtype: str, answers: dict[str, Result]) -> None:
    engine = drafting(model, dtype, model)
    drafter = engine.started.drafter
    assert drafter is not None
    engine.draft_with(drafter, 0)
    engine.run(WORKLOAD)
    engine.draft_with(drafter, 3)
    assert_all_guessed(engine, WORKLOAD, answers)


def test_another_model_changes_no_answer_and_a_seed_draws_alike(model: Path, dtype: str, other: Path) -> None:
    sampled = [
        submit(str(n), SHARED[: 4 + n], max_tokens=20, temperature=3.0, seed=n, ignore_eos=True)
        for n in range(6)
    ]
    plain = Harness(model, dtype=dtype, cpu_kernels="native", **SIZES).run(sampled)
    engine = drafting(model, dtype, other)
    results = engine.run(sampled)
    assert [name for name in results if not results[name].same_bits(plain[name])] == []
    # Of two random models at this temperature the noise decides.
    assert sum(result.num_accepted for result in results.values()) > 12


def test_what_it_takes_is_in_the_report(model: Path, dtype: str, other: Path) -> None:
    report = drafting(model, dtype, other).started.report
    assert report["drafter"] == "draft-model: always 3 drafts, keyed verification"
    assert any(str(other) in note for note in report["drafter_notes"])
    assert any(line.startswith("of these the drafter: ") for line in report["memory"])


def test_a_model_with_other_tokens_is_refused(model: Path, other: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((other / name).read_bytes())
    text = (other / "tokenizer.json").read_text()
    assert '"x":' in text
    swapped = text.replace('"x":', '"?":', 1).replace('"y":', '"x":', 1).replace('"?":', '"y":', 1)
    (tmp_path / "tokenizer.json").write_text(swapped)
    with pytest.raises(UnsupportedError, match="other tokens than the target") as raised:
        read_drafting(EngineSection(drafter=str(tmp_path)), open_checkpoint(model))
    assert "same family" in raised.value.hint


def test_weights_that_are_no_numbers_are_named(model: Path, dtype: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "drafter")
    change_tensor(tmp_path / "drafter", "model.norm.weight", lambda values: values[0].fill_(float("nan")))
    with pytest.raises(ModelFileError, match=r"drafter.*the tensor model\.norm\.weight holds 1 NaN"):
        drafting(model, dtype, tmp_path / "drafter")
