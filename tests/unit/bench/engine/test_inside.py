"""The benchmarks of the engine's inside on a tiny model: work that is counted, quality that is measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.base.errors import UsageError
from firstlight.bench.engine.in_process import logits_of, open_engine
from firstlight.bench.engine.offline import OfflineOrder, Work, bench_offline, tables
from firstlight.bench.engine.quality import QualityOrder, bench_quality, details, read_texts, table
from firstlight.bench.engine.quality_full import kl_divergence, read_long_text, read_questions
from firstlight.bench.machine import machine_rates
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.planning.memory_budget import kv_bytes_per_token
from support.experts import kimi, write_experts
from support.serving import write_chat_model


def test_the_divergence_of_equal_distributions_is_nothing() -> None:
    log = torch.randn(5, 11, dtype=torch.float64).log_softmax(-1)
    assert kl_divergence(log, log).abs().max() == 0


def test_the_divergence_is_that_of_torch() -> None:
    exact, other = torch.randn(2, 7, 13, dtype=torch.float64).log_softmax(-1)
    theirs = torch.nn.functional.kl_div(other, exact, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_divergence(exact, other), theirs)


def test_there_are_twenty_texts_of_some_length() -> None:
    texts = read_texts()
    assert len(texts) == len(set(texts)) == 20
    assert min(len(text) for text in texts) > 400


def test_texts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\n----\ntwo\nlines\n----\n\n")
    assert read_texts(path) == ["one", "two\nlines"]
    with pytest.raises(UsageError, match="nowhere"):
        read_texts(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def test_work_is_what_the_checkpoint_makes_necessary(tiny_model: Path) -> None:
    checkpoint = open_checkpoint(tiny_model)
    description, tensors = checkpoint.description, checkpoint.tensors
    work = Work(checkpoint, kv_row_bytes=(4, 4))
    is_tied = description.tie_embeddings
    unread = 0 if is_tied else tensors["model.embed_tokens.weight"].nbytes
    assert work.weight_bytes == checkpoint.total_bytes - unread
    layer = [t for name, t in tensors.items() if ".layers." in name and len(t.shape) == 2]
    assert work.layer_flops == 2 * sum(math.prod(tensor.shape) for tensor in layer)
    one, two = work.decode(1, 10), work.decode(2, 10)
    assert two[1] == 2 * one[1]  # operations grow with the batch, the weights are read once
    assert two[0] - one[0] == 10 * kv_bytes_per_token(description, (4, 4))


def test_of_experts_those_are_read_that_tokens_choose(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_experts(tmp_path / "m", kimi()))
    description, tensors = checkpoint.description, checkpoint.tensors
    assert description.latent is not None
    size = description.latent.latent_size + description.latent.rope_size
    work = Work(checkpoint, kv_row_bytes=(2 * size,))
    of_experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    kv_bytes = description.num_layers * 2 * size
    assert work.kv_token_bytes == kv_bytes
    rest = work.weight_bytes - of_experts
    assert work.decode(1, 0)[0] == pytest.approx(rest + of_experts * 3 / 12)
    assert work.decode(2, 10)[0] == pytest.approx(rest + of_experts * (1 - 0.75**2) + 20 * kv_bytes)
    whole = 2 * sum(
        math.prod(t.shape) for name, t in tensors.items() if ".layers." in name and len(t.shape) == 2
    )
    assert work.layer_flops == pytest.approx(whole - 2 * of_experts / 4 * 9 / 12)


def test_a_sweep_of_a_tiny_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "READ_BYTES", 2**20)
    monkeypatch.setattr(machine_rates, "MATRIX_SIDE", 64)
    order = OfflineOrder(
        model=tiny_model, threads=1, batches=(1, 3), lengths=(8,), decode_steps=4, rounds=2, dtype="float32"
    )
    seen: list[tuple[int, int]] = []
    report = bench_offline(order, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [(point.kind, point.batch) for point in report.points] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 3),
    ]
    assert all(point.tokens_per_s > 0 and point.bandwidth_share > 0 for point in report.points)
    assert len(tables(report)) == 2


def test_a_sweep_beyond_the_models_length_is_refused(tiny_model: Path) -> None:
    order = OfflineOrder(model=tiny_model, lengths=(100_000,))
    with pytest.raises(UsageError, match="positions"):
        bench_offline(order, lambda done, total: None)


def test_logits_do_not_depend_on_the_rows_of_a_step(tiny_model: Path) -> None:
    engine = open_engine(tiny_model, "float32", EngineSection(threads=1, max_model_len=64, max_num_seqs=4))
    tokens = list(range(3, 30))
    whole = logits_of(engine, tokens, len(tokens))
    for rows in (1, 8):
        assert torch.equal(logits_of(engine, tokens, rows), whole)


def test_quality_of_a_tiny_model(tiny_model: Path) -> None:
    texts = ["some text, and", "more of it"]
    order = QualityOrder(model=tiny_model, texts=texts, threads=1, goal=1.0)
    report = bench_quality(order, lambda done, total: None)
    assert details(report) == ""
    assert [gap.rows_per_step for gap in report.gaps] == [1, 8, 0]
    assert report.meets_goal
    assert report.reference_perplexity > 1
    for gap in report.gaps:
        assert 0 <= gap.kl_mean <= gap.kl_max < 0.1
        assert gap.perplexity == pytest.approx(report.reference_perplexity, rel=0.05)
    assert table(report).row_count == 4


def test_a_long_text_is_scored_in_windows(tiny_model: Path) -> None:
    text = "some text, and more of it. " * 60
    order = QualityOrder(model=tiny_model, texts=["a text"], threads=1, goal=1.0, long_text=(text, "a test"))
    long = bench_quality(order, lambda done, total: None).long_text
    assert long is not None
    assert long.num_tokens > 512, "more than one window"
    assert (long.source, long.num_bytes) == ("a test", len(text))
    assert long.perplexity == pytest.approx(long.reference_perplexity, rel=0.05)
    assert 0 <= long.kl_mean < 0.1


def test_what_the_full_quality_asks(tmp_path: Path) -> None:
    assert len(set(read_questions())) == 50
    text, source = read_long_text()
    assert len(text.encode()) == 100_000
    assert "Python" in source
    own = tmp_path / "own.txt"
    own.write_text("é" * 60_000)
    text, source = read_long_text(own)
    assert (len(text), source) == (50_000, "own.txt")
    with pytest.raises(UsageError, match="cannot read"):
        read_long_text(tmp_path / "none.txt")
