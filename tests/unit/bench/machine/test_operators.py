"""The benchmark of the operators on a tiny model: every operator of a step, with what it reads and does."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.bench.machine import operators
from firstlight.bench.machine.operators import OperatorsOrder, bench_operators, tables
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from support.serving import write_chat_model


def test_every_operator_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "READ_BYTES", 2**20)
    monkeypatch.setattr(operators, "LOOPS", 1000)
    model = write_chat_model(tmp_path / "tiny")
    seen: list[tuple[int, int]] = []
    order = OperatorsOrder(model, threads=2, rows=(1, 3), history=20, rounds=2, kv_dtype="int8")
    report = bench_operators(order, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert list(report.step_s) == [1, 3]
    layers = open_checkpoint(model).description.num_layers
    one, three = ([point for point in report.points if point.num_rows == rows] for rows in (1, 3))
    assert [point.name for point in one] == [point.name for point in three]
    assert {"norm", "attention", "gate", "rotary and KV write"} < {point.name for point in one}
    for alone, together in zip(one, three, strict=True):
        assert together.multiply_ops == 3 * alone.multiply_ops
        assert alone.seconds > 0
        if alone.name == "attention":
            assert alone.num_layers == layers
            description = open_checkpoint(model).description
            row_bytes = description.head_size + 8
            assert alone.read_bytes == 2 * 21 * description.num_kv_heads * row_bytes
            assert together.read_bytes == 3 * alone.read_bytes
    assert report.limits.read_bytes_per_s > 0
    assert [table.row_count for table in tables(report)] == [len(report.points), 2]
