"""Collectives between real processes, and what is said when a rank does not come, is dead or elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.base.errors import EngineError
from firstlight.ops.collectives import Group, join
from firstlight.ops.cpu.library import open_library

pytestmark = pytest.mark.slow  # real processes

RANK = Path(__file__).parents[2] / "support" / "collective_rank.py"
SOURCES = Path(__file__).parents[3] / "src"
BOTH = pytest.mark.parametrize("means", ["shared-memory", "gloo"])


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Compiled before a test's clock runs."""
    open_library()


def run_ranks(folder: Path, scenario: str, deadline_s: float, means: str) -> list[dict[str, Any]]:
    """What each of two ranks printed; an empty answer from one that said nothing."""
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    order = [str(folder / "rendezvous"), scenario, str(deadline_s), means]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), *order],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "imported\n"
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        # Asking the next one closes the input that an absent rank waits for.
        texts = [process.communicate(timeout=60)[0] for process in ranks]
        return [json.loads(text) if text else {} for text in texts]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@BOTH
def test_two_ranks_sum_join_and_agree(tmp_path: Path, means: str) -> None:
    for answer in run_ranks(tmp_path, "agree", 30.0, means):
        assert answer["sum"] == [0.0, 11.0, 22.0, 33.0]
        assert answer["join"] == [[0.0, 1.0, 2.0, 10.0, 11.0], [3.0, 4.0, 5.0, 12.0, 13.0]]
        assert answer["least"] == 6
        assert answer["entered"] == answer["left"] == ["least", 3]


@BOTH
def test_a_rank_that_does_not_come_is_an_error_that_names_the_collective(tmp_path: Path, means: str) -> None:
    answer, _ = run_ranks(tmp_path, "absent", 2.0, means)
    assert "rank 0: collective 'layers.1.attention' number 2 did not complete within 2 s" in answer["error"]
    assert ("rank 1 did not come to it, after number 1" in answer["error"]) == (means == "shared-memory")
    assert "log in the run directory" in answer["hint"]
    assert (answer["entered"], answer["left"]) == (["layers.1.attention", 2], ["layers.0.mlp", 1])
    assert answer["seconds"] < 20


@BOTH
def test_a_dead_rank_is_noticed_without_waiting_for_the_deadline(tmp_path: Path, means: str) -> None:
    answer, _ = run_ranks(tmp_path, "dead", 50.0, means)
    assert "collective 'layers.1.attention' number 2 was broken off" in answer["error"]
    assert ("rank 1 died, after number 1" in answer["error"]) == (means == "shared-memory")
    assert "pair.cc" not in answer["error"]
    assert answer["seconds"] < 40


def test_ranks_in_different_collectives_are_told_at_once(tmp_path: Path) -> None:
    for rank, answer in enumerate(run_ranks(tmp_path, "apart", 50.0, "shared-memory")):
        assert "number 2 met another one, a collective mismatch: " in answer["error"]
        assert f"rank {1 - rank} came to number 2 with another name or size" in answer["error"]
        assert answer["seconds"] < 40


def test_ranks_that_do_not_arrive_are_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rank 1: ranks 0, 2 did not arrive within 0 s"):
        join(Group(1, 3, deadline_s=0.1), tmp_path / "rendezvous")


def test_a_single_rank_needs_no_group() -> None:
    group = Group()
    tensor = torch.ones(2, 3)
    assert group.all_reduce("a", tensor) is tensor
    assert group.gather_columns("b", tensor, [3]) is tensor
    assert group.agree_on_least("c", 5) == 5
    assert group.num_entered == 0
