"""`bench speculation` over a tiny model: what it compares is the same work, and it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.base.errors import UsageError
from firstlight.bench.engine.speculation import SpeculationOrder, bench_speculation, table
from firstlight.bench.engine.speculation_subjects import WITHOUT, parse_tree
from firstlight.engine.speculation.shape import Shape
from support.fake_openai import Behaviour, FakeOpenAI
from support.serving import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench") / "tiny")


def order_of(model: Path, **changes: object) -> SpeculationOrder:
    small = {"batches": (1, 3), "rounds": 2, "prompts_each": 2, "answer_tokens": 24, "threads": 1}
    asked = {"model": model, "drafters": ("ngram",), "cpu_kernels": "stock", **small, **changes}
    return SpeculationOrder(**asked)  # type: ignore[arg-type]


def test_every_drafter_and_server_answers_the_same_prompts(model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "one two three one two three"}\n{"prompt": "what is it?"}\n')
    rounds: list[tuple[int, int]] = []
    with FakeOpenAI(Behaviour(tokens_per_chunk=2, chunk_delay_s=0.002)) as server:
        order = order_of(model, files=(questions,), beside=(server.url,), adapt=False)
        report = bench_speculation(order, lambda done, total: rounds.append((done, total)))
        asked = {tuple(request["prompt"]) for request in server.requests if "prompt" in request}
    assert rounds[-1] == (4, 4)
    assert [(p.batch, p.drafter) for p in report.points] == [
        (batch, drafter) for batch in (1, 3) for drafter in (WITHOUT, "ngram", server.url)
    ]
    plain, ngram, other = report.points[:3]
    assert plain.ratio == 1.0
    assert ngram.same_answers == ngram.answers == 2 * 2
    assert (ngram.drafts["drafter"], ngram.drafts["draft_tokens"]) == ("ngram", 3)
    assert other.same_answers is None
    assert other.tokens_per_s > 0
    assert len(asked) == 2
    assert set(report.step_times_s) == {WITHOUT, "ngram k=3"}
    assert table(report).row_count == len(report.points)


def test_without_files_families_that_are_held_out_are_asked(model: Path) -> None:
    order = order_of(model, drafters=(), batches=(1,), rounds=1)
    report = bench_speculation(order, lambda done, total: None)
    assert [point.drafter for point in report.points] == [WITHOUT, "ngram"] * 2
    assert [point.group for point in report.points] == ["advice", "advice", "chat", "chat"]


def test_a_server_that_refuses_is_named(model: Path) -> None:
    with FakeOpenAI(Behaviour(error_after=1)) as server:
        order = order_of(model, beside=(server.url,), batches=(1,), rounds=1)
        with pytest.raises(UsageError, match="gave no answer"):
            bench_speculation(order, lambda done, total: None)


@pytest.mark.parametrize("text", ["3", "3x4", "3x1x9", "3x4x99", "axbxc", "9x4x8"])
def test_what_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tree(text)
    assert caught.value.hint
    assert parse_tree("3x4x16") == Shape(3, 4, 16)
