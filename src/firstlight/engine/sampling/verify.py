"""From a step's logits to the tokens of each sequence: one, or as many as its verified drafts allow.

A draft is accepted iff it equals the token that the sampler chooses in its place, with the tokens before it
as its history; so with a seed, drafts change no token. Of a tree, the draft that equals it leads on. Another
`Rule` may stand in for that. Invariant: every sequence gets at least one token; without a rule, the one it
gets without drafts.

Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch

from firstlight.engine.messages import TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.engine.sampling.rule import Rule
from firstlight.engine.sampling.sampler import Sampler, token_logprobs
from firstlight.engine.scheduler.sequence import Sequence
from firstlight.engine.speculation.tree import ROOT, behind, find


@dataclass
class Chosen:
    """`runs[i]` are the tokens of sequence i; `logprobs[i]`, where asked for, those of each of its tokens."""

    runs: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


def verify(drafts: Rows[int], targets: Rows[int]) -> list[int]:
    """The run of a sequence: drafts as far as they are the target's tokens, and then one more of its own.

    `targets[i]` is the target's token after the first i drafts.
    """
    num = 0
    while num < len(drafts) and drafts[num] == targets[num]:
        num += 1
    return list(targets[: num + 1])


def verify_tree(drafts: Rows[int], parents: Rows[int], targets: Rows[int]) -> list[int]:
    """The same where drafts are a tree: `targets[1 + i]` is the target's token behind draft i."""
    run: list[int] = []
    place: int | None = ROOT
    while place is not None:
        run.append(targets[place + 1])
        place = find(drafts, parents, run[-1], place)
    return run


def choose(
    sampler: Sampler, logits_LV: torch.Tensor, sequences: Rows[Sequence], rule: Rule | None = None
) -> Chosen:
    """The tokens of each sequence, from a row of logits for each and one for each of its drafts."""
    if len(logits_LV) == len(sequences):
        sampled = sampler.sample(logits_LV, sequences)
        logprobs = {row: [value] for row, value in sampled.logprobs.items()}
        return Chosen([[token] for token in sampled.tokens], logprobs)
    first_rows: list[int] = []
    row = 0
    for sequence in sequences:
        first_rows.append(row)
        row += 1 + len(sequence.drafts)
    if rule is None and sampler.takes_largest(sequences):
        tokens = sampler.largest(logits_LV)
        return Chosen([_verified(s, tokens[row:]) for s, row in zip(sequences, first_rows, strict=True)])
    return _in_order(sampler, logits_LV, sequences, first_rows, rule)


def _verified(sequence: Sequence, targets: Rows[int]) -> list[int]:
    if sequence.parents:
        return verify_tree(sequence.drafts, sequence.parents, targets)
    return verify(sequence.drafts, targets)


def _in_order(
    sampler: Sampler,
    logits_LV: torch.Tensor,
    sequences: Rows[Sequence],
    first_rows: list[int],
    rule: Rule | None,
) -> Chosen:
    """Draft after draft, because what is chosen next depends on what was accepted before."""
    chosen = Chosen([[] for _ in sequences])
    accepted = dict.fromkeys(range(len(sequences)), ROOT)  # by sequence, the place of the last one
    while accepted:
        rows = [first_rows[index] + place + 1 for index, place in accepted.items()]
        histories = [Ahead.of(sequences[index], list(chosen.runs[index])) for index in accepted]
        rows_LV = logits_LV[rows]
        sampled = sampler.sample(rows_LV, histories)
        going_on: dict[int, int] = {}
        for number, (index, place) in enumerate(accepted.items()):
            drafts, parents, token = sequences[index].drafts, sequences[index].parents, sampled.tokens[number]
            if rule is not None:
                after = [drafts[draft] for draft in behind(drafts, parents, place)]
                token = rule.token(
                    histories[number], len(chosen.runs[index]), after, token, logits_LV[rows[number]]
                )
            chosen.runs[index].append(token)
            if number in sampled.logprobs:
                logprobs = _of_token(token, sampled.logprobs[number], rows_LV[number])
                chosen.logprobs.setdefault(index, []).append(logprobs)
            draft = find(drafts, parents, token, place)
            if draft is not None:
                going_on[index] = draft
        accepted = going_on
    return chosen


def _of_token(token: int, sampled: TokenLogprobs, logits_V: torch.Tensor) -> TokenLogprobs:
    """The log-probabilities of the token that a rule put in the place of the sampled one."""
    return sampled if sampled.token_id == token else token_logprobs(logits_V, token, len(sampled.top))


class Ahead:
    """A sequence as it will be once some drafts are accepted: see `sampler.History`.

    `drafts` that were accepted count as output of `sequence`; nothing is copied until it is asked for.
    """

    __slots__ = ("_drafts", "_sequence")

    def __init__(self, sequence: Sequence, drafts: list[int]) -> None:
        self._sequence, self._drafts = sequence, drafts

    @staticmethod
    def of(sequence: Sequence, drafts: list[int]) -> Sequence | Ahead:
        """The sequence itself where no draft counts."""
        return Ahead(sequence, drafts) if drafts else sequence

    @property
    def params(self) -> SamplingParams:
        return self._sequence.params

    @property
    def end_ids(self) -> frozenset[int]:
        return self._sequence.end_ids

    @property
    def num_tokens(self) -> int:
        return self._sequence.num_tokens + len(self._drafts)

    @property
    def num_output(self) -> int:
        return self._sequence.num_output + len(self._drafts)

    @property
    def tokens(self) -> list[int]:
        return self._sequence.tokens + self._drafts

    @property
    def output_counts(self) -> Counter[int] | None:
        counts = self._sequence.output_counts
        return None if counts is None else counts + Counter(self._drafts)
