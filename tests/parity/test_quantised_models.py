"""Tiny models in every format of quantised safetensors: the logits of their twins in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from support.engines import Harness
from support.quantised import RECIPES, write_quantised

NUM_TOKENS = 40
FAST_TOLERANCE = 0.06  # as of the other models


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tokens() -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(64) for _ in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_those_of_the_dequantised_twin(tmp_path: Path, name: str) -> None:
    folder = write_quantised(tmp_path, RECIPES[name])
    expected = Harness(folder / "twin").logits_of(tokens())
    assert torch.equal(Harness(folder).logits_of(tokens()), expected)
    fast = Harness(folder, dtype="auto").logits_of(tokens())
    assert float((fast - expected).norm() / expected.norm()) < FAST_TOLERANCE
