"""The order of a start, what it reports, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firstlight.base.config import MIN_MODEL_LEN, EngineSection
from firstlight.base.errors import (
    FirstlightError,
    ModelFileError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from firstlight.engine.worker.not_numbers import Inspection
from firstlight.engine.worker.startup import Started, quiet, self_test, start
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.ops.collectives import Group
from support.checkpoints import mixed_formats, random_weights, tiny_description, write_gguf, write_hf_folder

Reports = list[tuple[str, int, int, str]]


def run(path: Path, *, dtype: str = "float32", **section: Any) -> tuple[Started, Reports]:
    reports: Reports = []

    def report(phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        reports.append((phase, done, total, unit))

    sizes = {"threads": 1, "kv_memory_bytes": 2**25, **section}
    return start(open_checkpoint(path), dtype, EngineSection(**sizes), Group(), report), reports


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    description = tiny_description()
    target = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_gguf(target, description, random_weights(description), format_of=mixed_formats)


def test_phases_come_in_order_and_weights_end_complete(path: Path) -> None:
    started, reports = run(path)
    phases = list(dict.fromkeys(phase for phase, *_ in reports))
    assert phases == [p for p in ("device", "build", "prepare", "weights", "kv") if p in phases]
    assert {"device", "build", "weights", "kv"} <= set(phases)
    weights = [entry for entry in reports if entry[0] == "weights"]
    assert [entry[1] for entry in weights] == sorted(entry[1] for entry in weights)
    assert weights[-1][1:] == (started.checkpoint.total_bytes, started.checkpoint.total_bytes, "bytes")


BACKENDS = [("float32", "auto", "reference"), ("auto", "auto", "cpu-native"), ("auto", "stock", "cpu")]


@pytest.mark.parametrize(("dtype", "kernels", "backend"), BACKENDS)
def test_the_report_says_what_runs_and_why(path: Path, dtype: str, kernels: str, backend: str) -> None:
    started, _ = run(path, dtype=dtype, cpu_kernels=kernels)
    report = started.report
    assert report["backend"].startswith(f"{backend} (")
    assert report["row_invariant"] == (backend != "cpu")
    assert set(report["formats"]) == {"F32", "Q8_0", "Q4_0", "Q4_1"}
    assert any("layer" in note or "every matrix" in note for note in report["layouts"])
    assert any("kv cache" in note for note in report["memory"])
    assert report["max_model_len"] == started.section.max_model_len == 256
    assert report["kv_tokens"] == (started.num_pages - 1) * 16
    assert report["weights_read_bytes"] == started.checkpoint.total_bytes


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_more_tokens_fit_where_keys_and_values_are_smaller(path: Path, dtype: str) -> None:
    tokens: dict[str, int] = {}
    for kv_dtype in ("float16", "bfloat16", "int8"):
        started, reports = run(path, dtype=dtype, kv_dtype=kv_dtype, cpu_kernels="native")
        assert started.report["kv_dtypes"] == [kv_dtype, kv_dtype]
        tokens[kv_dtype] = started.report["kv_tokens"]
        pool = started.runner._pool
        size = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
        assert [total for phase, _, total, _ in reports if phase == "kv"][-1] == size
        page_bytes = size // started.num_pages
        assert 2**25 - page_bytes < size - page_bytes <= 2**25
        self_test(started.core(started.runner.run), Inspection(started.checkpoint), quiet)
    assert tokens["float16"] == tokens["bfloat16"]
    # Heads of 16: 32 bytes, or 16 with a tail of 8.
    assert tokens["int8"] == pytest.approx(tokens["float16"] * 32 / 24, abs=16)


REFUSED: dict[str, tuple[dict[str, Any], type[FirstlightError], str]] = {
    "length": ({"max_model_len": 257}, UsageError, "257"),
    "kv memory": ({"kv_memory_bytes": 10_000}, ResourceError, "--kv-memory"),
    "step": ({"max_num_seqs": 600}, UsageError, "--max-batched-tokens"),
    "dtype": ({"dtype": "int3"}, UnsupportedError, "int3"),
    "kv dtype": ({"kv_dtype": "int3"}, UnsupportedError, "--kv-dtype int3"),
    "kv dtype of stock": (
        {"dtype": "auto", "cpu_kernels": "stock", "kv_dtype": "int8"},
        UnsupportedError,
        "int8",
    ),
    "device": ({"device": "abacus"}, UnsupportedError, "abacus"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_its_name(path: Path, name: str) -> None:
    options, kind, word = REFUSED[name]
    with pytest.raises(kind, match=word) as caught:
        run(path, **options)
    assert caught.value.hint


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    description = tiny_description()
    weights = random_weights(description)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"model.layers.1.mlp.up_proj.weight"):
        run(write_hf_folder(tmp_path / "m", description, weights))


def test_the_shortest_length_passes_the_self_test(path: Path) -> None:
    started, _ = run(path, max_model_len=MIN_MODEL_LEN)
    self_test(started.core(started.runner.run), Inspection(started.checkpoint), quiet)
