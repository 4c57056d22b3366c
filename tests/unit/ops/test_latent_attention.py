"""Attention over latents, and what goes with it: products for each head, and the choice of experts."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec.structs import replace

from firstlight.facts.description import Experts
from firstlight.ops.contract import AttentionShape, Backend
from firstlight.ops.cpu.backend import CpuBackend
from firstlight.ops.cpu.native_backend import NativeBackend
from firstlight.ops.cuda.backend import CudaBackend
from firstlight.ops.expert_layer import choose_experts
from firstlight.ops.kv_rows import pack
from firstlight.ops.reference import ReferenceBackend
from support.native_sets import EMULATED, instruction_sets, pool_of
from support.operators import Paged, matrix, random_values

LENGTHS = (1, 17, 63, 64, 65, 128, 129, 300)
# The emulated set differs in products of codes alone, which attention has none of.
SETS = [name for name in instruction_sets() if name != EMULATED]
# Heads in shares of 8, of 5, and of one; sizes with and without whole vectors of 8.
SHAPES = {"16 heads": (16, 48, 32), "5 heads": (5, 40, 24), "1 head": (1, 48, 40), "11 heads": (11, 37, 21)}
BACKENDS = {
    "reference": lambda: ReferenceBackend("test"),
    "stock": lambda: CpuBackend("test"),
    "cuda's arithmetic": lambda: CudaBackend("test", torch.device("cpu"), torch.float32),
    **{f"native {name}": lambda name=name: NativeBackend(pool_of(name)) for name in SETS},
}


def shape_of(name: str) -> AttentionShape:
    heads, size, value_size = SHAPES[name]
    plain = AttentionShape(heads, heads, size, None, None, value_size)
    return AttentionShape(heads, 1, size, None, 0.3, value_size, plain)


def attend(ops: Backend, paged: Paged, entries: list[tuple[int, int, int]], q: torch.Tensor) -> torch.Tensor:
    rows = paged.rows(entries)
    latents = pack(paged.keys, ops.key_dtype)
    return ops.attend(q, latents, latents, ops.plan_attention(rows, paged.shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_latents(backend: str, name: str) -> None:
    ops = BACKENDS[backend]()
    paged = Paged.random(shape_of(name), LENGTHS)
    entries = [
        (s, max(0, length - 1 - 35 * (s % 2)), min(length, 1 + 35 * (s % 2)))
        for s, length in enumerate(LENGTHS)
    ]
    places = [(s, position) for s, first, num in entries for position in range(first, first + num)]
    q = random_values(len(places), paged.shape.num_heads, paged.shape.head_size, seed=9)
    got = attend(ops, paged, entries, q)
    expected = torch.stack([paged.naive(q[t], *place) for t, place in enumerate(places)])
    tolerance = 2e-5 if ops.key_dtype == torch.float32 else 4e-3
    assert got.shape == (len(places), paged.shape.num_heads, paged.shape.out_size)
    assert float((got.double() - expected).abs().max()) < tolerance


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("instructions", SETS)
def test_rows_of_latents_have_their_bits_alone_and_in_chunks(instructions: str, kv_dtype: str) -> None:
    for ops in (
        NativeBackend(pool_of(instructions, 3), kv_dtype=kv_dtype),
        ReferenceBackend("test", kv_dtype),
    ):
        paged = Paged.random(shape_of("16 heads"), (300, 200), seed=4)
        q = random_values(180, 16, 48, seed=2)
        whole = attend(ops, paged, [(0, 150, 150), (1, 170, 30)], q)
        for first, num in ((0, 1), (3, 40), (149, 1)):
            part = attend(ops, paged, [(0, 150 + first, num)], q[first : first + num])
            assert torch.equal(part, whole[first : first + num]), (kv_dtype, first)
        assert torch.equal(attend(ops, paged, [(1, 199, 1)], q[179:]), whole[179:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_for_each_head(backend: str) -> None:
    ops = BACKENDS[backend]()
    weights = [random_values(24, 32, seed=seed) for seed in range(5)]
    heads = ops.heads_linear([matrix(weight, "F32") for weight in weights])
    x = random_values(7, 5, 32, seed=8)
    expected = torch.einsum("tni,noi->tno", x, torch.stack(weights))
    torch.testing.assert_close(heads(x), expected, rtol=1e-4, atol=1e-4)
    if ops.row_invariant:
        assert torch.equal(heads(x[3:4]), heads(x)[3:4])
    shared = random_values(7, 24, seed=3)
    back = heads.back(shared)
    assert (back is None) == ops.row_invariant
    if back is not None:
        expected = torch.einsum("to,noi->tni", shared, torch.stack(weights))
        torch.testing.assert_close(back, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_of_groups(backend: str) -> None:
    ops = BACKENDS[backend]()
    grouped = ops.grouped_linear(4)
    weights = [random_values(24, 32, seed=seed) for seed in range(4)]
    for group, weight in enumerate(weights):
        grouped.put(group, matrix(weight, "F32"))
    for counts in ((3, 0, 40, 1), (0, 0, 0, 0), (0, 0, 0, 5)):
        starts = torch.tensor([0, *itertools.accumulate(counts)])
        x = random_values(sum(counts), 32, seed=8)
        expected = torch.cat([part @ w.t() for part, w in zip(x.split(counts), weights, strict=True)])
        error = (grouped(x, starts) - expected).abs().max() if len(x) else torch.zeros(())
        assert float(error) < (1e-4 if ops.row_invariant else 0.3), counts


RULES = {
    "softmax": Experts(num=12, num_chosen=3, inner_size=1),
    "softmax of the chosen groups": Experts(
        num=12, num_chosen=3, inner_size=1, num_groups=4, num_chosen_groups=2, normalises=False, scale=4.0
    ),
    "sigmoid, bias and groups": Experts(
        num=12, num_chosen=3, inner_size=1, scoring="sigmoid", has_bias=True, num_groups=3,
        num_chosen_groups=2, num_group_scores=2, scale=2.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_choice_of_experts(name: str) -> None:
    """Against the rule spelt out for one token at a time."""
    rule = RULES[name]
    scores = random_values(50, 12, seed=1, scale=2.0)
    bias = random_values(12, seed=2) if rule.has_bias else None
    chosen, weights = choose_experts(scores, bias, rule)
    for token in range(50):
        ids, expected = spelt_out(scores[token].double(), bias, rule)
        assert sorted(chosen[token].tolist()) == ids
        got = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert [got[expert] for expert in ids] == pytest.approx(expected, rel=1e-5)
        alone = choose_experts(scores[token : token + 1], bias, rule)
        assert torch.equal(alone[0][0], chosen[token])
        assert torch.equal(alone[1][0], weights[token])


def test_a_bias_changes_who_is_chosen_and_not_how_it_is_weighed() -> None:
    rule = replace(RULES["sigmoid, bias and groups"], num_groups=1, num_chosen_groups=1, normalises=False)
    scores = torch.zeros(1, 12)
    bias = torch.zeros(12)
    bias[[4, 7, 9]] = 0.1
    chosen, weights = choose_experts(scores, bias, rule)
    assert sorted(chosen[0].tolist()) == [4, 7, 9]
    assert weights[0].tolist() == [0.5 * 2.5] * 3


def spelt_out(
    scores: torch.Tensor, bias: torch.Tensor | None, rule: Experts
) -> tuple[list[int], list[float]]:
    plain = (scores.sigmoid() if rule.scoring == "sigmoid" else scores.softmax(0)).tolist()
    wish = plain if bias is None else [a + b for a, b in zip(plain, bias.tolist(), strict=True)]
    size = rule.num // rule.num_groups
    groups = [list(range(first, first + size)) for first in range(0, rule.num, size)]
    groups.sort(
        key=lambda group: -sum(sorted((wish[e] for e in group), reverse=True)[: rule.num_group_scores])
    )
    open_to = [expert for group in groups[: rule.num_chosen_groups] for expert in group]
    ids = sorted(sorted(open_to, key=lambda expert: -wish[expert])[: rule.num_chosen])
    total = sum(plain[expert] for expert in ids) if rule.normalises else 1.0
    return ids, [plain[expert] / total * rule.scale for expert in ids]
