"""The documents that `explain` measures with, and what a drafter makes of them without an engine.

States are those of the float32 reference, of every layer, so that a drafter can be asked what it would be
worth on other layers. Invariant: masks and tokens are made from the answers' ids, never taken from what a
stage stored, so that a fault there does not hide itself.

Shapes: T tokens of a document, L blocks, C captured states, H hidden, Q indices that are drafted from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.drafter.chain import run_chain, unrolled_proposer
from firstlight.drafter.evaluate import bootstrap
from firstlight.drafter.explain.evidence import Accuracy, Bucket, OwnLoop
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_unroll import UnrollRows

OFFSETS = 4  # of the answer's first drafts, that are told apart
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 1 << 30)


@dataclass(frozen=True)
class Sample:
    """A prompt with an answer of the target; `states` [T, L + 1, H] of the reference, float32.

    `choices` [T]: what the reference would say behind each token. A greedy answer is that.
    """

    name: str
    tokens: list[int]
    num_prompt: int
    states: torch.Tensor
    choices: torch.Tensor

    def for_layers(self, layers: tuple[int, ...]) -> torch.Tensor:
        """The states [T - 1, C, H] that a drafter of these layers takes."""
        return self.states[:-1, list(layers)]

    @property
    def queries(self) -> torch.Tensor:
        """Indices j whose x_{j+1} and x_{j+2} are the answer's."""
        first = self.num_prompt - 1
        return torch.arange(first, max(len(self.tokens) - 2, first))

    def rows(self, layers: tuple[int, ...]) -> UnrollRows:
        """What the drafter unrolls from, made here, whatever training makes."""
        index = torch.arange(len(self.tokens) - 1)
        tokens = torch.tensor(self.tokens[1:])
        return UnrollRows(self.for_layers(layers), tokens, index, self.queries, torch.zeros_like(index))


class _Counts:
    """Right and all drafts, by step and by what they are told apart by."""

    def __init__(self, k: int) -> None:
        self.valid, self.correct = [0] * k, [0] * k
        self.reached, self.accepted = [0] * k, [0] * k
        self.known = 0
        self.offsets: dict[int, list[int]] = {}
        self.lengths: dict[int, list[int]] = {}

    def add_first(self, correct: torch.Tensor, known: torch.Tensor, queries: torch.Tensor) -> None:
        """The first drafts of a document."""
        self.known += int(known.sum())
        ends = torch.tensor(LENGTHS)
        places = torch.bucketize(queries, ends, right=True)
        for number, (right, place) in enumerate(zip(correct.tolist(), places.tolist(), strict=True)):
            for table, key in ((self.offsets, min(number, OFFSETS)), (self.lengths, LENGTHS[place])):
                row = table.setdefault(key, [0, 0])
                row[0] += right
                row[1] += 1


@torch.no_grad()
def measure(drafter: Eagle3Drafter, samples: list[Sample], k: int) -> Accuracy:
    """Teacher-forced accuracy of k drafts over the full vocabulary."""
    counts = _Counts(k)
    known_V = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    known_V[drafter.target_ids_R] = True
    for sample in samples:
        _count(counts, drafter, sample, known_V)
    conditional = [a / max(r, 1) for a, r in zip(counts.accepted, counts.reached, strict=True)]
    return Accuracy(
        k=k,
        num_tokens=counts.valid[0],
        accuracy=[c / max(v, 1) for c, v in zip(counts.correct, counts.valid, strict=True)],
        conditional=conditional,
        predicted_length=predicted_length(conditional),
        in_vocabulary=counts.correct[0] / max(counts.known, 1),
        coverage=counts.known / max(counts.valid[0], 1),
        longest=max((len(sample.tokens) for sample in samples), default=0),
        by_offset=_buckets(counts.offsets),
        by_length=_buckets(counts.lengths),
    )


def predicted_length(conditional: list[float]) -> float:
    """Tokens of a target step: 1 plus the sum of the products of conditional accuracies."""
    length, chance = 1.0, 1.0
    for rate in conditional:
        chance *= rate
        length += chance
    return length


def own_loop(drafter: Eagle3Drafter, samples: list[Sample], k: int) -> OwnLoop:
    """The chain loop over all samples."""
    layers = drafter.config.state_layers
    results = []
    for sample in samples:
        tokens = sample.tokens[1:]
        propose = unrolled_proposer(drafter, k, sample.for_layers(layers), tokens)
        results.append(run_chain(tokens, sample.num_prompt - 1, k, propose))
    low, high = bootstrap(results, seed=0)
    emitted, rounds = (sum(getattr(r, name) for r in results) for name in ("emitted", "num_rounds"))
    return OwnLoop(k=k, acceptance_length=emitted / max(rounds, 1), low=low, high=high)


def _count(counts: _Counts, drafter: Eagle3Drafter, sample: Sample, known_V: torch.Tensor) -> None:
    rows = sample.rows(drafter.config.state_layers)
    choices, queries, last = sample.choices, rows.queries_Q, len(sample.tokens) - 3
    alive = torch.ones(len(queries), dtype=torch.bool)
    for step, output in enumerate(drafter.unroll(rows, len(counts.valid))):
        valid = queries + step <= last
        right = choices[(queries + step + 1).clamp(max=len(choices) - 1)]
        correct = valid & (drafter.target_ids_R[drafter.logits(output).argmax(-1)] == right)
        if step == 0:
            counts.add_first(correct, known_V[right], queries)
        counts.valid[step] += int(valid.sum())
        counts.correct[step] += int(correct.sum())
        alive = alive & valid
        counts.reached[step] += int(alive.sum())
        alive = alive & correct
        counts.accepted[step] += int(alive.sum())


def _buckets(table: dict[int, list[int]]) -> list[Bucket]:
    return [Bucket(end=end, num=num, accuracy=right / num) for end, (right, num) in sorted(table.items())]
