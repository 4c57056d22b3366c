"""What planning says of a rank's weights is what the models declare and the loader reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from firstlight.base.errors import UsageError
from firstlight.engine.worker.kv_pool import token_row_bytes
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.weight_schemes import DeclaredWeights
from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.declared import declared_rows
from firstlight.facts.planning.memory_budget import kv_row_bytes
from firstlight.facts.planning.outline import Outline, open_outline
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import EXPERTS, Ranks, kind_of, kv_heads_of, share_of
from firstlight.facts.planning.tensor_groups import TensorGroup, group_rows
from firstlight.loading.plan import make_plan
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import attention_shape
from firstlight.models.random_model import declared_shapes
from firstlight.models.registry import find
from firstlight.ops.collectives import Group
from firstlight.ops.reference import ReferenceBackend
from support.checkpoints import random_weights, tiny_description, write_gguf
from support.experts import description_of, write_experts

DENSE = ("llama", "qwen2", "qwen3")
WITH_EXPERTS = ("kimi_k2", "qwen3_moe", "mixtral", "minimax_m2")


def describe(architecture: str) -> ModelDescription:
    if architecture in DENSE:
        return tiny_description(architecture)
    return wider(description_of(architecture))


def wider(description: ModelDescription) -> ModelDescription:
    """Whose experts can be split in two."""
    experts = description.experts
    assert experts is not None
    shared = 2 * experts.shared_size
    return replace(description, experts=replace(experts, inner_size=128, shared_size=shared))


@pytest.mark.parametrize("architecture", DENSE + WITH_EXPERTS)
def test_names_and_shapes_are_those_that_models_declare(architecture: str) -> None:
    description = describe(architecture)
    rows = declared_rows(description, DeclaredWeights("F32"))
    assert {name: row.shape for row in rows for name in row.names()} == declared_shapes(description)


@pytest.mark.parametrize("architecture", ["llama", *WITH_EXPERTS])
@pytest.mark.parametrize("ranks", [Ranks(1), Ranks(2), Ranks(2, expert_parallel=True)], ids=str)
def test_bytes_are_those_of_a_read_plan(architecture: str, ranks: Ranks, tmp_path: Path) -> None:
    description = describe(architecture)
    path = write_experts(tmp_path / "model", description)
    checkpoint, outline = open_checkpoint(path), open_outline(str(path))
    weights = RankWeights(outline, ranks)
    read_bytes = 0
    for rank in range(ranks.num):
        ops, whole = ReferenceBackend("only names are asked for"), ranks.expert_parallel
        declare = Declaration(ops, Group(rank, ranks.num), expert_parallel=whole)
        find(description.architecture)(declare, description)
        plan = make_plan(checkpoint, declare.wanted, declare.of_others)
        assert plan.resident_bytes == weights.rank_bytes(rank)
        read_bytes += sum(segment.nbytes for segment in plan.segments)
    rows = next(way for way in weights.loaders(1.0) if way.name.startswith("whole rows"))
    assert rows.nbytes == read_bytes
    assert outline.total_bytes == checkpoint.total_bytes


def test_an_uneven_split_is_that_of_the_engine(tmp_path: Path) -> None:
    description = tiny_description(num_heads=9, num_kv_heads=3, tie_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", description, random_weights(description))
    outline = open_outline(str(path))
    weights = RankWeights(outline, Ranks(2))
    for rank in range(2):
        declare = Declaration(ReferenceBackend("only names are asked for"), Group(rank, 2))
        find(description.architecture)(declare, description)
        assert make_plan(open_checkpoint(path), declare.wanted).resident_bytes == weights.rank_bytes(rank)
    assert weights.fullest_rank == 0
    assert weights.rank_bytes(0) > weights.least_bytes
    assert weights.tied_head_bytes == description.vocab_size * description.hidden_size * 4 // 2
    assert RankWeights(outline, Ranks(1)).tied_head_bytes == 0
    assert RankWeights(outline, Ranks(2, splits_embedding=True)).tied_head_bytes == 0


def test_a_folder_without_weights_is_planned_by_rules(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "model", description_of("kimi_k2"))
    whole = open_outline(str(path))
    for file in path.glob("*.safetensors"):
        file.unlink()
    bare = open_outline(str(path))
    assert (bare.num_files, bare.num_tensors, bare.total_bytes) == (0, whole.num_tensors, whole.total_bytes)
    assert "follow from config.json" in bare.notes[0]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "kimi_k2"])
def test_rows_of_keys_are_those_of_the_pool(architecture: str, kv_dtype: str) -> None:
    description = describe(architecture)
    ops = ReferenceBackend("only sizes are asked for", kv_dtype)
    assert kv_row_bytes(description, kv_dtype) == token_row_bytes(attention_shape(description, 0, 1), ops)
    assert kv_heads_of(description, Ranks(2), 0) == attention_shape(description, 0, 2).num_kv_heads


def test_key_value_heads_are_repeated_on_more_ranks_than_there_are() -> None:
    description = tiny_description(num_heads=8, num_kv_heads=2)
    keys = TensorGroup("model.layers.#.self_attn.k_proj.weight", "F32", (32, 64), 32 * 64 * 4, 2)
    queries = TensorGroup("model.layers.#.self_attn.q_proj.weight", "F32", (128, 64), 128 * 64 * 4, 2)
    for rank in range(4):
        assert share_of(keys, description, Ranks(4), rank).nbytes == keys.total_bytes // 2
        assert share_of(queries, description, Ranks(4), rank).nbytes == queries.total_bytes // 4
        assert kv_heads_of(description, Ranks(4), rank) == 1


def test_whole_experts_are_shared_out_unevenly_where_they_must_be() -> None:
    description = description_of("mixtral")  # six experts
    groups = group_rows(declared_rows(description, DeclaredWeights("BF16")))
    experts = [group for group in groups if kind_of(group.name) == EXPERTS]
    for group in experts:
        shares = [share_of(group, description, Ranks(4, expert_parallel=True), rank) for rank in range(4)]
        assert [share.num_tensors * 6 // group.num for share in shares] == [2, 2, 1, 1]
        assert sum(share.nbytes for share in shares) == group.total_bytes


def test_more_ranks_than_the_model_can_be_split_into() -> None:
    description = tiny_description()
    groups = tuple(group_rows(declared_rows(description, DeclaredWeights("BF16"))))
    outline = Outline("tiny", description, groups, 0, ())
    with pytest.raises(UsageError, match="cannot be split over 8 ranks") as caught:
        RankWeights(outline, Ranks(8))
    assert "--tensor-parallel 4 or less" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "shape", "pieces", "piece_bytes"),
    [
        ("gate_proj.qweight", (8, 128), 8, 64 * 4),  # GPTQ: inputs first, so outputs are columns
        ("down_proj.qweight", (16, 64), 1, 8 * 64 * 4),
        ("gate_proj.weight_scale_inv", (8, 4), 1, 4 * 4 * 4),
        ("down_proj.weight_scale_inv", (4, 8), 4, 4 * 4),
        ("down_proj.weight_scale", (64, 1), 1, 64 * 4),  # a scale for each output, and inputs are split
        ("down_proj.weight_shape", (2,), 1, 2 * 4),
        ("down_proj.bias", (64,), 1, 64 * 4),
        ("up_proj.bias", (128,), 1, 64 * 4),
    ],
)
def test_tensors_of_packed_matrices(name: str, shape: tuple[int, ...], pieces: int, piece_bytes: int) -> None:
    group = TensorGroup(f"model.layers.#.mlp.{name}", "I32", shape, 4 * math.prod(shape), 1)
    share = share_of(group, tiny_description(intermediate_size=128), Ranks(2), 1)
    assert (share.num_tensors, share.num_pieces, share.piece_bytes) == (1, pieces, piece_bytes)
