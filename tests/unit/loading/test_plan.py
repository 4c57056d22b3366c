"""Slices and their checks: uneven shares, whole blocks, whole heads, and errors that name the tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading.plan import Wanted, make_plan, split_evenly
from support.checkpoints import mixed_formats, random_weights, tiny_description, write_gguf, write_hf_folder

GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    description = tiny_description()
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description), format_of=mixed_formats)
    return open_checkpoint(path)


def all_wanted(checkpoint: Checkpoint, *changes: Wanted) -> list[Wanted]:
    by_name = {tensor.name: Wanted.whole(tensor.name, tensor.shape) for tensor in checkpoint.tensors.values()}
    by_name.update({wanted.name: wanted for wanted in changes})
    return list(by_name.values())


def test_shapes_of_slices() -> None:
    assert Wanted.whole("w", (4, 6)).slice_shape == (4, 6)
    assert Wanted.row_slice("w", (4, 6), 1, 3).slice_shape == (2, 6)
    assert Wanted.column_slice("w", (4, 6), 0, 2).slice_shape == (4, 2)
    assert Wanted.row_slice("b", (4,), 1, 4).slice_shape == (3,)


def test_the_plan_is_in_file_order(checkpoint: Checkpoint) -> None:
    plan = make_plan(checkpoint, all_wanted(checkpoint)[::-1])
    offsets = [segment.offset for segment in plan.segments]
    assert offsets == sorted(offsets)
    assert plan.resident_bytes == checkpoint.total_bytes
    assert plan.unused == ()


def test_bytes_of_slices(checkpoint: Checkpoint) -> None:
    plan = make_plan(
        checkpoint,
        all_wanted(
            checkpoint,
            Wanted.row_slice(GATE, (96, 64), 10, 20),
            Wanted.column_slice(DOWN, (64, 96), 32, 96),
        ),
    )
    by_name = {segment.wanted.name: segment for segment in plan.segments}
    gate, down = by_name[GATE], by_name[DOWN]
    assert (gate.offset - gate.facts.offset, gate.nbytes, gate.resident_bytes) == (10 * 40, 10 * 40, 10 * 40)
    assert (down.nbytes, down.row_bytes, down.skipped_bytes, down.kept_bytes) == (64 * 60, 60, 20, 40)
    assert down.resident_bytes == 64 * 40


def test_a_cut_block_names_tensor_format_and_sizes_that_work(checkpoint: Checkpoint) -> None:
    wanted = all_wanted(checkpoint, Wanted.column_slice(DOWN, (64, 96), 0, 48))
    with pytest.raises(
        UsageError, match=rf"columns 0\.\.48 of {DOWN} cut through a Q4_1 block of 32"
    ) as caught:
        make_plan(checkpoint, wanted)
    assert caught.value.hint.endswith("1, 3.")


def test_a_cut_head_is_refused(checkpoint: Checkpoint) -> None:
    wanted = all_wanted(checkpoint, Wanted.row_slice(QUERY, (64, 64), 0, 24))
    with pytest.raises(UsageError, match="cut through an attention head of 16 rows") as caught:
        make_plan(checkpoint, wanted)
    assert "--tensor-parallel 4 or less" in caught.value.hint


def test_a_missing_tensor(checkpoint: Checkpoint) -> None:
    wanted = [*all_wanted(checkpoint), Wanted.whole("model.layers.9.mlp.up_proj.weight", (96, 64))]
    with pytest.raises(ModelFileError, match=r"layers\.9\.mlp\.up_proj\.weight is missing"):
        make_plan(checkpoint, wanted)


def test_another_shape(checkpoint: Checkpoint) -> None:
    wanted = all_wanted(checkpoint, Wanted.whole(GATE, (96, 128)))
    with pytest.raises(ModelFileError, match=rf"{GATE} has the shape \[96, 64\].*demands \[96, 128\]"):
        make_plan(checkpoint, wanted)


def test_tensors_nobody_wants_are_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelFileError, match=f"1 tensors do not belong to a llama model.*{GATE}"):
        make_plan(checkpoint, [wanted for wanted in all_wanted(checkpoint) if wanted.name != GATE])


def test_ignorable_tensors_are_reported(tmp_path: Path) -> None:
    description = tiny_description(tie_embeddings=True)
    weights = random_weights(description)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    checkpoint = open_checkpoint(write_hf_folder(tmp_path / "m", description, weights))
    wanted = [item for item in all_wanted(checkpoint) if item.name != "lm_head.weight"]
    assert make_plan(checkpoint, wanted).unused == ("lm_head.weight",)


def test_mistakes_of_the_caller_are_value_errors(checkpoint: Checkpoint) -> None:
    wanted = all_wanted(checkpoint)
    with pytest.raises(ValueError, match="wanted twice"):
        make_plan(checkpoint, [*wanted, wanted[3]])
    for rows in ((0, 0), (5, 4), (-1, 4), (0, 97)):
        changed = dataclasses.replace(Wanted.whole(GATE, (96, 64)), rows=rows)
        with pytest.raises(ValueError, match=f"rows .* of {GATE}"):
            make_plan(checkpoint, all_wanted(checkpoint, changed))


def test_uneven_shares() -> None:
    assert [split_evenly(9, 3, rank, 2) for rank in range(2)] == [(0, 6), (6, 9)]
    assert [split_evenly(3, 1, rank, 3) for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(UsageError, match="cannot be split over 4 ranks") as caught:
        split_evenly(9, 3, 0, 4)
    assert "--tensor-parallel 3" in caught.value.hint
    with pytest.raises(UsageError, match="whole units of 32"):
        split_evenly(100, 32, 0, 2)


@given(units=st.integers(1, 50), unit=st.sampled_from([1, 3, 32, 64]), num_ranks=st.integers(1, 50))
def test_shares_cover_everything_once(units: int, unit: int, num_ranks: int) -> None:
    if units < num_ranks:
        return
    shares = [split_evenly(units * unit, unit, rank, num_ranks) for rank in range(num_ranks)]
    assert shares[0][0] == 0
    assert shares[-1][1] == units * unit
    assert all(before[1] == after[0] for before, after in zip(shares, shares[1:], strict=False))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= unit
