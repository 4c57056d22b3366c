"""The memory budget: sums that hold, and errors that say how much is missing and what to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.base.errors import ResourceError
from firstlight.facts.planning.memory_budget import (
    BudgetRequest,
    compute_budget,
    format_bytes,
    kv_bytes_per_token,
)
from support.checkpoints import tiny_description


def request(**changes: Any) -> BudgetRequest:
    fields: dict[str, Any] = {
        "available_bytes": 10_000,
        "fraction": 0.5,
        "weight_bytes": 1_000,
        "workspace_bytes": 500,
        "page_bytes": 100,
        "page_size_tokens": 16,
        "min_tokens": 64,
        "max_tokens": 10_000,
    }
    return BudgetRequest(**{**fields, **changes})


def test_kv_bytes_per_token() -> None:
    description = tiny_description(num_layers=30, num_heads=9, num_kv_heads=3, head_size=64)
    assert kv_bytes_per_token(description, (128, 128)) == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(description, (256, 128), num_kv_heads=1) == 30 * 64 * (4 + 2)


def test_what_is_left_becomes_pages() -> None:
    budget = compute_budget(request())
    assert (budget.num_pages, budget.num_tokens) == (35, 560)
    assert [line.nbytes for line in budget.lines] == [1_000, 500, 3_500, 0]
    assert budget.explain()[2] == "kv cache: 3.5 kB (35 pages of 16 tokens, 560 tokens in all: what is left)"
    assert "50% of 10.0 kB available" in budget.explain()[3]


def test_pages_that_could_never_be_used_are_not_taken() -> None:
    budget = compute_budget(request(max_tokens=170))
    assert budget.num_pages == 11
    assert "as many as can be used" in budget.explain()[2]


def test_ranks_share_the_memory() -> None:
    budget = compute_budget(request(num_ranks=2))
    assert budget.num_pages == 10
    assert "shared by 2 ranks" in budget.explain()[3]


def test_a_fixed_size() -> None:
    budget = compute_budget(request(kv_memory_bytes=1_050))
    assert budget.num_pages == 10
    assert "--kv-memory" in budget.explain()[2]


def test_too_little_for_the_longest_sequence() -> None:
    with pytest.raises(ResourceError) as caught:
        compute_budget(request(min_tokens=600))
    assert "a rank needs 5.3 kB (weights 1.0 kB, workspace 500 bytes, KV cache for 608 tokens 3.8 kB)" in str(
        caught.value
    )
    assert "5.0 kB may be planned for" in str(caught.value)
    assert "Set --max-model-len to 560 or less, or raise --memory-fraction to 0.53" in caught.value.hint


def test_too_little_for_the_weights() -> None:
    with pytest.raises(ResourceError) as caught:
        compute_budget(request(weight_bytes=20_000))
    assert "--max-model-len" not in caught.value.hint
    assert "--memory-fraction" not in caught.value.hint
    assert caught.value.hint.startswith("Free memory, or use a smaller")


def test_a_fixed_size_that_does_not_fit() -> None:
    with pytest.raises(ResourceError, match="Not enough memory") as caught:
        compute_budget(request(kv_memory_bytes=6_000))
    assert caught.value.hint.startswith("Lower --kv-memory to 3K, or raise --memory-fraction to 0.75")


def test_a_fixed_size_below_one_sequence() -> None:
    with pytest.raises(
        ResourceError, match=r"--kv-memory of 300 bytes holds 3 pages; a sequence of 64 tokens needs 4"
    ):
        compute_budget(request(kv_memory_bytes=300))


@given(
    available=st.integers(0, 1 << 42),
    fraction=st.floats(0.05, 0.98),
    weights=st.integers(0, 1 << 40),
    page=st.integers(1, 1 << 24),
    least=st.integers(1, 1 << 20),
    most=st.integers(1, 1 << 24),
    ranks=st.integers(1, 8),
)
def test_a_budget_never_exceeds_its_share(
    available: int, fraction: float, weights: int, page: int, least: int, most: int, ranks: int
) -> None:
    try:
        budget = compute_budget(
            request(
                available_bytes=available,
                fraction=fraction,
                weight_bytes=weights,
                page_bytes=page,
                min_tokens=least,
                max_tokens=most,
                num_ranks=ranks,
            )
        )
    except ResourceError:
        return
    assert sum(line.nbytes for line in budget.lines) == int(available * fraction) // ranks
    assert all(line.nbytes >= 0 for line in budget.lines)
    assert budget.num_tokens >= least


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_500, "1.5 kB"), (98_362_432, "98.4 MB"), (2**40, "1099.51 GB")],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
