"""Layers without a whole model: rotary tables, stacked linears, embeddings and heads, shares of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from firstlight.base.errors import UnsupportedError, UsageError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.description import ModelDescription, RopeScaling
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import attention_shape
from firstlight.models.layers.linear import Linear, Part, interleave_rows
from firstlight.models.layers.rotary import turn_table
from firstlight.models.layers.vocabulary import Embedding, Head
from firstlight.models.random_model import Unpacked, write_random_model
from firstlight.models.registry import ARCHITECTURES, find
from firstlight.ops.collectives import Group
from firstlight.ops.contract import MatrixKind
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.reference import ReferenceBackend
from firstlight.quant.weight import Weight
from support.checkpoints import ARCHITECTURES as DENSE
from support.checkpoints import random_weights, tiny_description, write_hf_folder
from support.experts import GROUPED, description_of, kimi
from support.operators import matrix, random_values

CPU = torch.device("cpu")


def declaration(rank: int = 0, size: int = 1) -> Declaration:
    return Declaration(ReferenceBackend("test"), Group(rank, size))


def weight(values: torch.Tensor, weight_format: str = "F32") -> Weight:
    if values.ndim == 1:
        return Weight("F32", tuple(values.shape), values.view(1, -1).contiguous().view(torch.uint8))
    return matrix(values, weight_format)._weight


# --- rotary ---


def test_the_turn_table_holds_cos_and_sin_of_each_position_and_pair() -> None:
    description = tiny_description(head_size=8, rope_theta=100.0)
    table = turn_table(description, 20, CPU)
    assert table.shape == (20, 4, 2)
    for position in (0, 1, 19):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            expected = torch.tensor([math.cos(angle), math.sin(angle)])
            torch.testing.assert_close(table[position, pair], expected, atol=1e-5, rtol=0)


def test_linear_scaling_stretches_positions() -> None:
    plain = turn_table(tiny_description(), 40, CPU)
    scaled = turn_table(tiny_description(rope_scaling=RopeScaling(kind="linear", factor=4.0)), 40, CPU)
    torch.testing.assert_close(scaled[4::4], plain[1:10], atol=1e-5, rtol=0)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    plain = tiny_description(head_size=32, rope_theta=500.0)
    scaled = tiny_description(head_size=32, rope_theta=500.0, rope_scaling=scaling)
    # Small angles at position 1, so that the sine is the frequency.
    before, after = (torch.asin(turn_table(d, 2, CPU)[1, 1:, 1]) for d in (plain, scaled))
    wavelengths = 2 * math.pi / before
    ratio = before / after
    torch.testing.assert_close(ratio[wavelengths < 16], torch.ones_like(ratio[wavelengths < 16]))
    torch.testing.assert_close(ratio[wavelengths > 64], torch.full_like(ratio[wavelengths > 64], 8.0))
    between = ratio[(wavelengths > 16) & (wavelengths < 64)]
    assert len(between) > 0
    assert bool(((between > 1) & (between < 8)).all())


def test_factors_of_a_file_divide_the_frequencies() -> None:
    scaling = RopeScaling(kind="factors", factors=(1.0, 2.0, 4.0, 8.0))
    plain = turn_table(tiny_description(head_size=8), 30, CPU)
    scaled = turn_table(tiny_description(head_size=8, rope_scaling=scaling), 30, CPU)
    for pair, factor in enumerate((1, 2, 4, 8)):
        torch.testing.assert_close(
            scaled[factor::factor, pair], plain[1 : 1 + 29 // factor, pair], atol=1e-5, rtol=0
        )


def test_interleaving_rows_pairs_the_halves_of_each_head() -> None:
    rows = torch.arange(12)[:, None].repeat(1, 2)
    assert interleave_rows(rows, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


# --- linear layers ---


def stacked(
    formats: dict[str, str], *, bias: bool = False
) -> tuple[Linear, Declaration, dict[str, torch.Tensor]]:
    """A layer of parts a, b and c, whose weights were delivered in the reverse order."""
    declare = declaration()
    shapes = {"a": (32, 64), "b": (64, 64), "c": (16, 64)}
    parts = [Part(Wanted.whole(name, shape)) for name, shape in shapes.items()]
    biases = (
        [Part(Wanted.whole(f"{name}.bias", (shape[0],))) for name, shape in shapes.items()] if bias else []
    )
    linear = Linear(declare, parts, biases)
    values = {}
    for number, wanted in enumerate(reversed(declare.wanted)):
        made = random_values(*wanted.shape, seed=number)
        stored = weight(made, formats.get(wanted.name, "F32"))
        declare.deliver(wanted, stored)
        values[wanted.name] = made if made.ndim == 1 else matrix(made, stored.format).dequantize()
    declare.finish()
    return linear, declare, values


@pytest.mark.parametrize(
    ("formats", "num_products"),
    [({}, 1), ({"a": "Q4_1", "b": "Q4_1", "c": "Q8_0"}, 2), ({"a": "Q4_1", "b": "F16", "c": "Q4_1"}, 3)],
    ids=["one format", "two formats", "all differ"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_stacked_in_order_whatever_their_formats(
    formats: dict[str, str], num_products: int, bias: bool
) -> None:
    linear, _, values = stacked(formats, bias=bias)
    x = random_values(5, 64, seed=9)
    expected = torch.cat([x @ values[name].t() for name in "abc"], 1)
    if bias:
        expected += torch.cat([values[f"{name}.bias"] for name in "abc"])
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)
    assert len(linear._linears) == num_products


def test_what_is_declared_twice_or_delivered_twice_or_never_is_caught() -> None:
    declare = declaration()
    wanted = Wanted.whole("a", (2, 2))
    Linear(declare, [Part(wanted)])
    with pytest.raises(ValueError, match="two layers want the tensor a"):
        Linear(declare, [Part(wanted)])
    with pytest.raises(AssertionError, match="did not deliver"):
        declare.finish()
    declare.deliver(wanted, weight(torch.zeros(2, 2)))
    with pytest.raises(AssertionError, match="delivered twice"):
        declare.deliver(wanted, weight(torch.zeros(2, 2)))
    declare.finish()


# --- the ends of a model ---


@pytest.mark.parametrize("weight_format", ["F32", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ops", [ReferenceBackend("test"), CpuBackend("test")], ids=["reference", "cpu"])
def test_embedding_and_head(weight_format: str, tied: bool, ops: ReferenceBackend | CpuBackend) -> None:
    declare = Declaration(ops, Group())
    name = "embed" if tied else "head"
    head = Head(declare, name, (96, 64), tied=tied)
    embedding = Embedding(declare, "embed", (96, 64), head if tied else None)
    stored = {"embed": random_values(96, 64, seed=1), "head": random_values(96, 64, seed=2)}
    for wanted in declare.wanted:
        declare.deliver(wanted, weight(stored[wanted.name], weight_format))
    declare.finish()
    ids = torch.tensor([0, 95, 17, 17])
    exact = matrix(stored["embed"], weight_format).dequantize()
    torch.testing.assert_close(embedding(ids), exact[ids])
    x = random_values(3, 64, seed=3)
    logits = head(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, x @ matrix(stored[name], weight_format).dequantize().t(), atol=2e-2, rtol=1e-3
    )
    assert embedding.num_bytes == 0 if tied and ops.name == "reference" else embedding.num_bytes > 0


# --- whole models ---


ON_EVERY_RANK = (
    "model.embed_tokens.weight",
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
)


def described(architecture: str, **changes: Any) -> ModelDescription:
    """A tiny model of an architecture."""
    if architecture in DENSE:
        return tiny_description(architecture, **changes)
    if architecture == "deepseek_v2":
        changes = {"experts": replace(GROUPED, scoring="softmax", normalises=False), **changes}
    if architecture in ("deepseek_v2", "deepseek_v3"):
        return kimi(architecture=architecture, **changes)
    return description_of(architecture, **changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_announces_what_it_lays_out(tmp_path: Path, architecture: str) -> None:
    description = described(architecture)
    if description.experts is None:
        folder = write_hf_folder(tmp_path / "m", description, random_weights(description), dtype="BF16")
    else:
        folder = write_random_model(tmp_path / "m", description, Unpacked(torch.bfloat16))
    checkpoint = open_checkpoint(folder)

    class Recording(ReferenceBackend):
        seen: list[MatrixKind] = []

        def linear(self, weight, *, role):  # type: ignore[no-untyped-def]
            self.seen.append(MatrixKind(role, weight.format, weight.shape))
            return super().linear(weight, role=role)

    ops = Recording("test")
    ops.seen = []
    declare = Declaration(ops, Group())
    find(architecture)(declare, description)
    assert {wanted.name for wanted in declare.wanted} == checkpoint.tensors.keys()
    read_tensors(checkpoint, declare.wanted, declare.deliver)
    declare.finish()
    assert sorted(declare.kinds(checkpoint), key=str) == sorted(ops.seen, key=str)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'mamba' is not supported") as caught:
        find("mamba")
    assert "llama" in caught.value.hint


@pytest.mark.parametrize(("num_kv_heads", "size"), [(3, 2), (8, 4), (2, 2), (5, 3), (1, 1)])
def test_ranks_share_all_heads_and_no_head_twice(num_kv_heads: int, size: int) -> None:
    description = tiny_description(num_heads=num_kv_heads * 3, num_kv_heads=num_kv_heads, sliding_window=7)
    shapes = [attention_shape(description, rank, size) for rank in range(size)]
    assert sum(shape.num_kv_heads for shape in shapes) == num_kv_heads
    assert all(shape.num_heads == 3 * shape.num_kv_heads for shape in shapes)
    assert all(shape.window == 7 for shape in shapes)
    assert max(s.num_kv_heads for s in shapes) - min(s.num_kv_heads for s in shapes) <= 1


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be split over 4 ranks"):
        attention_shape(tiny_description(), 0, 4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shares_of_all_ranks_cover_every_matrix_once(architecture: str, size: int) -> None:
    """Matrices are cut into rows or columns; only what all ranks need is on every one."""
    description = described(architecture, num_heads=6, num_kv_heads=3, vocab_size=65)
    if description.experts is not None:
        shared_size = 96 if description.experts.shared_size else 0
        experts = replace(description.experts, inner_size=96, shared_size=shared_size)
        description = replace(description, experts=experts)
    covered: dict[str, int] = {}
    for rank in range(size):
        declare = declaration(rank, size)
        find(architecture)(declare, description)
        for wanted in declare.wanted:
            covered[wanted.name] = covered.get(wanted.name, 0) + math.prod(wanted.slice_shape)
    whole = declaration()
    find(architecture)(whole, description)
    for wanted in whole.wanted:
        shared = len(wanted.shape) == 2 and not wanted.name.endswith(ON_EVERY_RANK)
        shared |= wanted.name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        times = 1 if shared else size
        assert covered[wanted.name] == times * math.prod(wanted.shape), wanted.name
