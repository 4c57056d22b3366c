"""Verification: which tokens a sequence gets from its rows, with the history that each row has."""

from __future__ import annotations

import pytest
import torch

from firstlight.engine.sampling.sampler import Sampler
from firstlight.engine.sampling.verify import choose, verify, verify_tree
from firstlight.engine.scheduler.sequence import NO_TOKEN, Sequence
from firstlight.engine.speculation.tree import ROOT
from support.sampling import END, sequence

VOCABULARY = 16


@pytest.mark.parametrize(
    ("drafts", "targets", "expected"),
    [
        ([], [4], [4]),
        ([4], [4, 5], [4, 5]),
        ([3], [4, 5], [4]),
        ([4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]),
        ([4, 9, 6], [4, 5, 6, 7], [4, 5]),
        ([9, 5, 6], [4, 5, 6, 7], [4]),
        ([4, 5], [4, NO_TOKEN, 6], [4, NO_TOKEN]),
    ],
)
def test_drafts_count_as_far_as_they_are_the_target_s(
    drafts: list[int], targets: list[int], expected: list[int]
) -> None:
    assert verify(drafts, targets) == expected


def drafted(drafts: list[int], prompt: list[int], output: list[int], **params: object) -> Sequence:
    made = sequence(prompt, output, **params)
    made.drafts = drafts
    return made


def one_by_one(logits: torch.Tensor, item: Sequence, drafts: list[int]) -> tuple[list[int], list[float]]:
    """What as many steps of one token would give, each with its own row."""
    tokens, logprobs = [], []
    for row in logits:
        sampled = Sampler().sample(row[None].clone(), [item])
        tokens.append(sampled.tokens[0])
        logprobs += [value.logprob for value in sampled.logprobs.values()]
        item.tokens.append(tokens[-1])
        if item.output_counts is not None:
            item.output_counts[tokens[-1]] += 1
        if len(tokens) > len(drafts) or tokens[-1] != drafts[len(tokens) - 1]:
            break
    return tokens, logprobs


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 8, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 0},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 5, "logit_bias": {END: 20.0}},
]


@pytest.mark.parametrize("params", KINDS)
def test_each_row_is_chosen_with_the_tokens_before_it(params: dict[str, object]) -> None:
    num_accepted = 0
    for number in range(40):
        logits = 3 * torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(number))
        targets, _ = one_by_one(logits, sequence([5, 6], [7, 8], **params), list(range(9)))
        known = drafted([], [5, 6], [7, 8], **params)
        for row in range(4):  # drafts that are right as far as row `number % 5`
            sampled = Sampler().sample(logits[row : row + 1].clone(), [known])
            known.tokens.append(sampled.tokens[0])
            if known.output_counts is not None:
                known.output_counts[sampled.tokens[0]] += 1
        drafts = known.tokens[4:]
        if number % 5 < 4:
            drafts[number % 5] = (drafts[number % 5] + 1) % VOCABULARY
        tokens, logprobs = one_by_one(logits, sequence([5, 6], [7, 8], **params), drafts)
        other = drafted([], [1], [], temperature=0.0)
        rows = torch.cat((logits, logits[:1]))
        chosen = choose(Sampler(), rows, [drafted(drafts, [5, 6], [7, 8], **params), other])
        assert chosen.runs[0] == tokens
        assert [value.logprob for value in chosen.logprobs.get(0, [])] == logprobs
        num_accepted += len(tokens) - 1
        assert targets[0] == tokens[0]
    assert num_accepted == 40 / 5 * (0 + 1 + 2 + 3 + 4)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([4, 0, 0, 0, 0, 0], [4, 0]),
        ([5, 0, 6, 0, 0, 0], [5, 6, 0]),  # 6 stands behind 4 and behind 5
        ([5, 0, 7, 0, 0, 9], [5, 7, 9]),
        ([4, 7, 0, 0, 0, 0], [4, 7]),  # 7 stands behind 5 alone
        ([8, 0, 0, 0, 0, 0], [8]),
        ([5, 0, NO_TOKEN, 0, 0, 0], [5, NO_TOKEN]),
    ],
)
def test_of_a_tree_the_branch_counts_that_is_the_target_s(targets: list[int], expected: list[int]) -> None:
    drafts, parents = [4, 5, 6, 6, 7], [ROOT, ROOT, 0, 1, 1]
    assert verify_tree(drafts, parents, targets) == expected


@pytest.mark.parametrize("params", KINDS)
def test_each_node_is_chosen_with_its_own_branch_before_it(params: dict[str, object]) -> None:
    """A tree of which some branch is right: the run is that of a chain with this branch alone."""
    num_accepted = 0
    for number in range(40):
        logits = 3 * torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(number))
        # Node 2 follows node 0, and 3 and 5 follow 2; 1 and 4 lie beside them.
        parents, branch = [ROOT, ROOT, 0, 2, 0, 2], [0, 2, 3 if number % 2 else 5]
        rows = [0, *(place + 1 for place in branch)]
        right, _ = one_by_one(logits[rows], sequence([5, 6], [7, 8], **params), list(range(9)))
        known = drafted([], [5, 6], [7, 8], **params)
        drafts = [0] * 6
        for place, row in zip(branch, rows, strict=False):
            sampled = Sampler().sample(logits[row : row + 1].clone(), [known])
            drafts[place] = sampled.tokens[0]
            known.tokens.append(drafts[place])
            if known.output_counts is not None:
                known.output_counts[drafts[place]] += 1
        for place, parent in enumerate(parents):
            if place not in branch:
                drafts[place] = (drafts[{ROOT: 0, 0: 2, 2: branch[2]}[parent]] + 1) % VOCABULARY
        made = drafted(list(drafts), [5, 6], [7, 8], **params)
        made.parents = list(parents)
        other = drafted([], [1], [], temperature=0.0)
        chosen = choose(Sampler(), torch.cat((logits, logits[:1])), [made, other])
        chain = [drafts[place] for place in branch]
        tokens, logprobs = one_by_one(logits[rows], sequence([5, 6], [7, 8], **params), chain)
        assert chosen.runs[0] == tokens
        assert [value.logprob for value in chosen.logprobs.get(0, [])] == logprobs
        assert right[0] == tokens[0]
        num_accepted += len(tokens) - 1
    assert num_accepted == 40 * 3
