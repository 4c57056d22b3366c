"""Rows that describe headers, and groups of tensors that are alike."""

from __future__ import annotations

from firstlight.facts.planning.tensor_groups import (
    HeaderRow,
    NamedTensor,
    group_rows,
    group_tensors,
    number_range,
)


def test_a_row_stands_for_every_combination() -> None:
    row = HeaderRow("model.layers.{0-1,4}.mlp.{gate,up}_proj.weight", "BF16", (6, 4))
    assert row.num == 6
    assert row.nbytes == 6 * 4 * 2
    assert list(row.names())[:3] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
    ]
    assert list(HeaderRow("lm_head.weight", "F32", (2, 2)).names()) == ["lm_head.weight"]


def test_rows_and_their_tensors_make_the_same_groups() -> None:
    rows = [
        HeaderRow("model.layers.{0-2}.mlp.experts.{0-9}.{gate,up}_proj.weight_packed", "I32", (4, 2)),
        HeaderRow("model.layers.{0}.mlp.down_proj.weight", "BF16", (4, 4)),
        HeaderRow("model.norm.weight", "BF16", (4,)),
    ]
    tensors = [NamedTensor(name, row.dtype, row.shape, row.nbytes) for row in rows for name in row.names()]
    groups = group_rows(rows)
    assert group_tensors(tensors) == groups
    assert [group.num for group in groups] == [30, 30, 1, 1]
    assert groups[0].name == "model.layers.#.mlp.experts.#.gate_proj.weight_packed"


def test_ranges_of_numbers() -> None:
    assert number_range([0]) == "{0}"
    assert number_range([0, 1, 2, 5, 7, 8]) == "{0-2,5,7-8}"
