"""Collectives between two real processes, and what is said when a rank does not come or is dead."""

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

pytestmark = pytest.mark.slow  # real processes

RANK = Path(__file__).parents[2] / "support" / "collective_rank.py"
SOURCES = Path(__file__).parents[3] / "src"


def run_ranks(folder: Path, scenario: str, deadline_s: float) -> list[dict[str, Any]]:
    """What each of two ranks printed; an empty answer from one that said nothing."""
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(folder / "rendezvous"), scenario, str(deadline_s)],
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
        first, _ = ranks[0].communicate(timeout=60)
        second, _ = ranks[1].communicate(timeout=60)  # closes the input that an absent rank waits for
        return [json.loads(text) if text else {} for text in (first, second)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_two_ranks_sum_join_and_agree(tmp_path: Path) -> None:
    for answer in run_ranks(tmp_path, "agree", 30.0):
        assert answer["sum"] == [0.0, 11.0, 22.0, 33.0]
        assert answer["join"] == [[0.0, 1.0, 2.0, 10.0, 11.0], [3.0, 4.0, 5.0, 12.0, 13.0]]
        assert answer["least"] == 6
        assert answer["entered"] == answer["left"] == ["least", 3]


def test_a_rank_that_does_not_come_is_an_error_that_names_the_collective(tmp_path: Path) -> None:
    answer, _ = run_ranks(tmp_path, "absent", 2.0)
    assert "rank 0: collective 'layers.1.attention' number 2 did not complete within 2 s" in answer["error"]
    assert "log in the run directory" in answer["hint"]
    assert (answer["entered"], answer["left"]) == (["layers.1.attention", 2], ["layers.0.mlp", 1])
    assert answer["seconds"] < 20


def test_a_dead_rank_is_noticed_without_waiting_for_the_deadline(tmp_path: Path) -> None:
    answer, _ = run_ranks(tmp_path, "dead", 50.0)
    assert "collective 'layers.1.attention' number 2 was broken off" in answer["error"]
    assert "pair.cc" not in answer["error"]
    assert answer["seconds"] < 40


def test_ranks_that_do_not_arrive_are_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rank 1: ranks 0, 2 did not arrive within 0 s"):
        join(Group(1, 3, deadline_s=0.1), tmp_path / "rendezvous", "cpu")


def test_a_single_rank_needs_no_group() -> None:
    group = Group()
    tensor = torch.ones(2, 3)
    assert group.all_reduce("a", tensor) is tensor
    assert group.gather_columns("b", tensor, [3]) is tensor
    assert group.agree_on_least("c", 5) == 5
    assert group.num_entered == 0
