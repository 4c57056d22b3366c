"""Trees of the EAGLE-3 drafter: grown as EAGLE-2 says, and what accepted branches leave in the slots.

A tree is compared with one that is grown node by node, each way to a node computed from the text anew.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.scheduler.plan import StepPlan
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.drafter import Tree
from firstlight.engine.speculation.eagle3 import Eagle3TreeDrafter
from firstlight.engine.speculation.shape import Shape
from firstlight.engine.speculation.tree import depths, first_path, path_of
from firstlight.models.eagle3 import DraftCache, Eagle3Drafter
from support.eagle3 import LENGTH, NUM, SIZES, Pair, tiny_eagle3, write_pair
from support.engines import Harness, Result, submit

TREE = Shape(NUM, 4, 14)
TREES = {"draft_top_k": 4, "draft_nodes": 14}
TEXT = [3 + (5 * n) % 60 for n in range(40)]
MIXED = [
    submit("one", TEXT[:1], max_tokens=14, ignore_eos=True),
    submit("short", TEXT[:7], max_tokens=16, ignore_eos=True),
    submit("whole pages", TEXT[:8], max_tokens=20, ignore_eos=True),
    submit("seeded", TEXT[:9], max_tokens=20, ignore_eos=True, temperature=1.5, seed=4),
]
Folders = tuple[Path, Path]
Ways = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=["float32", "auto"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(folders: Folders, dtype: str) -> dict[str, Result]:
    return Harness(folders[0], dtype=dtype, cpu_kernels="native", **SIZES).run(MIXED)


@torch.no_grad()
def ways_of(model: Eagle3Drafter, states: torch.Tensor, tokens: list[int], shape: Shape) -> Ways:
    """Log-probability of every node that may be in the tree behind `tokens`, by the way to it."""
    fused, known = model.fuse(states), torch.tensor(tokens)

    def guesses(way: tuple[int, ...]) -> Ways:
        cache = DraftCache()
        output = model.advance(fused, known, cache)[-1:]
        for token in way:
            output = model.advance(model.feedback(output), torch.tensor([token]), cache)
        best = model.logits(output)[0].log_softmax(-1).topk(shape.top_k)
        found = zip(model.target_ids_R[best.indices].tolist(), best.values.tolist(), strict=True)
        return {(*way, token): value for token, value in found}

    level = guesses(())
    every = dict(level)
    for _ in range(1, shape.depth):
        going_on = sorted(level, key=lambda way: -level[way])[: shape.top_k]
        level = {way: level[before] + value for before in going_on for way, value in guesses(before).items()}
        every |= level
    return every


def ways_in(tree: Tree) -> list[tuple[int, ...]]:
    drafts, parents = tree
    ways: list[tuple[int, ...]] = []
    for token, parent in zip(drafts, parents, strict=True):
        ways.append((*(ways[parent] if parent >= 0 else ()), token))
    return ways


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["plain", "EAGLE-3.1"])
def test_a_tree_has_the_likeliest_of_the_nodes_that_may_be_in_it(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    pair = Pair(*write_pair(tmp_path, **flags), **TREES)
    model = tiny_eagle3(**flags)
    model.look_up = pair.embedding
    for length in (2, 5, 16, 33):
        sequence = pair.whole(TEXT[:length], SamplingParams(temperature=0.0, seed=0))
        every = ways_of(model, pair.states, TEXT[1:length], TREE)
        (tree,) = pair.other.propose_trees([sequence], TREE)
        ways = ways_in(tree)
        least = sorted(every.values())[-TREE.nodes]
        assert len(set(ways)) == TREE.nodes
        assert min(every[way] for way in ways) > least - 1e-4
        assert [every[way] for way in ways] == pytest.approx(sorted((every[w] for w in ways), reverse=True))


def test_trees_of_several_sequences_are_those_of_each_alone(folders: Folders, dtype: str) -> None:
    """And their likeliest branches are the chains."""
    pair = Pair(*folders, dtype, **TREES)
    sequences: list[Sequence] = []
    alone: list[Tree] = []
    one = Sequence(Submit("one", [5], SamplingParams(seed=0)), 0, frozenset(), LENGTH)
    assert pair.other.propose_trees([one], TREE) == [([], [])]
    for number, length in enumerate((2, 9, 23)):
        params = SamplingParams(temperature=0.7 * (number % 2), seed=number)
        sequence = pair.whole(TEXT[:length], params)
        alone += pair.other.propose_trees([sequence], TREE)
        chain = pair.other.propose([sequence], NUM)[0]
        drafts, parents = alone[-1]
        likeliest = [drafts[place] for place in first_path(parents)]
        assert likeliest == chain[: len(likeliest)]
        assert max(depths(parents), default=0) <= NUM
        assert path_of(drafts, parents, likeliest) == first_path(parents)
        sequences.append(sequence)
    # The pages have the last one's text: the others' is gone. More sequences than are grown at once.
    again = pair.other.propose_trees([sequences[2], one, sequences[2], sequences[2]], TREE)
    assert again[0] == again[2] == again[3]
    assert again[1] == ([], [])
    if dtype == "auto":
        assert again[0] == alone[2]


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_slots_and_drafts_are_those_of_the_whole_text(
    folders: Folders, dtype: str, answers: dict[str, Result], wrong: float
) -> None:
    assert Pair(*folders, dtype, **TREES).run(MIXED, answers, wrong, tree=TREE) >= 12


class WithoutMoves:
    """A drafter that leaves the keys of accepted nodes where they were written."""

    def __init__(self, drafter: Eagle3TreeDrafter) -> None:
        self._drafter, self.layers, self.name, self.is_model = drafter, drafter.layers, "planted", True

    def observe(self, plan: StepPlan, sequences: Rows[Sequence]) -> None:
        self._drafter.observe(plan, sequences)

    def propose(self, sequences: Rows[Sequence], num: int) -> list[list[int]]:
        raise AssertionError("only told of steps")


def test_a_drafter_that_does_not_move_accepted_nodes_is_found(
    folders: Folders, dtype: str, answers: dict[str, Result]
) -> None:
    with pytest.raises(AssertionError, match=" of "):
        Pair(*folders, dtype, **TREES).run(MIXED, answers, 0.0, WithoutMoves, tree=TREE)


def test_drafts_of_the_drafter_itself_change_nothing(
    folders: Folders, dtype: str, answers: dict[str, Result]
) -> None:
    pair = Pair(*folders, dtype, draft_adapt=False, **TREES)
    results = pair.engine.run(MIXED)
    assert all(results[name].same_bits(answers[name]) for name in answers)
    assert pair.engine.core.speculation is not None
    counts = pair.engine.core.speculation.counts
    assert (counts.top_k, counts.most_nodes, counts.nodes_now) == (4, 14, 14)
    assert counts.num_drafted > 10 * counts.num_verified
    assert "14 in a tree of 3 x 4" in pair.engine.started.report["drafter"]
