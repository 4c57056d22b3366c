"""Acceptance in figures, and acceptance by a given profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firstlight.base.config import EngineSection
from firstlight.base.draft_profile import parse_profile
from firstlight.base.errors import UsageError
from firstlight.base.resolve_config import check_engine
from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.sampling.verify import Ahead
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.metrics import DraftCounts, figures
from firstlight.engine.speculation.shape import shape_of
from firstlight.engine.speculation.synthetic import Synthetic
from firstlight.serve.http.draft_metrics import families

NO_LOGITS = torch.empty(0)


def test_the_figures_follow_from_the_counts() -> None:
    counts = DraftCounts("ngram", 3)
    for num_drafted, num_accepted in ((3, 3), (3, 1), (2, 0), (0, 0), (0, 0)):
        counts.record(num_drafted, num_accepted)
    said = figures(counts)
    assert (said["drafter"], said["draft_tokens"]) == ("ngram", 3)
    assert said["acceptance_length"] == pytest.approx((4 + 2 + 1) / 3, abs=1e-4)
    assert said["tokens_per_step"] == pytest.approx((4 + 2 + 1 + 2) / 5)
    assert said["accepted_per_drafted"] == 0.5
    assert said["acceptance_by_place"] == [0.6667, 0.3333, 0.5]
    assert said["conditional_acceptance_by_place"] == [0.6667, 0.5, 1.0]
    counts.forget()
    assert figures(counts)["acceptance_length"] is None


def test_of_a_tree_a_place_counts_once_and_its_nodes_altogether() -> None:
    counts = DraftCounts("eagle3", 3, top_k=4, most_nodes=16)
    for nodes, accepted, depth in ((16, 3, 3), (16, 0, 3), (8, 1, 2), (0, 0, 0)):
        counts.record(nodes, accepted, depth=depth)
    said = figures(counts)
    assert (said["draft_tokens"], said["draft_top_k"], said["draft_nodes"]) == (3, 4, 16)
    assert (said["num_drafted"], said["num_accepted"]) == (40, 4)
    assert said["acceptance_length"] == pytest.approx((4 + 1 + 2) / 3, abs=1e-4)
    assert said["accepted_per_drafted"] == 0.1
    assert said["acceptance_by_place"] == [0.6667, 0.3333, 0.5]
    assert said["conditional_acceptance_by_place"] == [0.6667, 0.5, 1.0]
    lines = [sample for family in families(counts) for sample in family.samples]
    assert {tuple(s.labels[name] for name in ("k", "top_k", "nodes")) for s in lines} == {("3", "4", "16")}
    assert next(s.value for s in lines if s.name == "firstlight:draft_tokens_total") == 40


def test_the_counts_are_kept_by_length_and_by_prefix_hit() -> None:
    counts = DraftCounts("ngram", 3)
    for num_tokens, is_hit, num_accepted in ((255, False, 3), (256, True, 1), (9000, True, 0)):
        counts.record(3, num_accepted, num_tokens, is_hit=is_hit)
    said = figures(counts)
    by_length: Any = said["by_length"]
    by_hit: Any = said["by_prefix_hit"]
    assert {name: part["acceptance_length"] for name, part in by_length.items()} == {
        "below 256": 4.0,
        "below 1024": 2.0,
        "from 4096": 1.0,
    }
    assert by_hit["yes"] == {"num_verified": 2, "num_drafted": 6, "num_accepted": 1, "acceptance_length": 1.5}
    lines = [sample for family in families(counts) for sample in family.samples]
    found = {s.name: s.value for s in lines if s.labels.get("length") == "below 1024"}
    assert found["firstlight:draft_accepted_tokens_by_length_total"] == 1
    assert sum(s.value for s in lines if s.name == "firstlight:draft_tokens_by_prefix_hit_total") == 9


def test_a_forced_profile_is_met_and_decides_the_same_again() -> None:
    sequence = Sequence(Submit("r", [1, 2, 3], SamplingParams(seed=5)), 0, frozenset(), 10**6)
    synthetic = Synthetic((0.8, 0.25))
    forced = [0, 0, 0]
    num = 4000
    drafts = [10, 11, 12]

    def taken_of() -> list[bool]:
        return [
            synthetic.token(
                Ahead.of(sequence, drafts[:place]), place, drafts[place : place + 1], 11, NO_LOGITS
            )
            == drafts[place]
            for place in range(3)
        ]

    for _ in range(num):
        sequence.tokens.append(1)
        taken = taken_of()
        assert taken == taken_of()
        forced = [count + one for count, one in zip(forced, taken, strict=True)]
    assert [count / num for count in forced] == pytest.approx([0.8, 0.25, 0.25], abs=0.03)
    assert synthetic.token(sequence, 3, [], 11, NO_LOGITS) == 11
    assert Synthetic((0.0,)).token(sequence, 0, [11, 10, 0], 11, NO_LOGITS) == 9
    assert Synthetic((1.0,)).token(sequence, 0, [5, 11], 11, NO_LOGITS) == 5


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((3, 1, 16), "is for trees"),
        ((5, 4, 4), "cannot be that deep"),
        ((2, 2, 7), "make 6 at most"),
    ],
)
def test_trees_that_contradict_themselves_are_refused(tree: tuple[int, int, int], words: str) -> None:
    depth, top_k, nodes = tree
    with pytest.raises(UsageError, match=words) as caught:
        check_engine(EngineSection(draft_tokens=depth, draft_top_k=top_k, draft_nodes=nodes))
    assert caught.value.hint
    check_engine(EngineSection(draft_tokens=3, draft_top_k=4))
    assert shape_of(EngineSection(draft_tokens=3, draft_top_k=4)) == (3, 4, 12)


@pytest.mark.parametrize("text", ["", "a,b", "0.5,1.5", "-1", "nan"])
def test_a_profile_of_other_things_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="draft-acceptance"):
        parse_profile(text)
