"""From a step's logits to the tokens of each sequence: one, or as many as its verified drafts allow.

Called by `EngineCore`. A draft is accepted iff it equals the token that the sampler chooses in its place,
with the tokens before it as its history; so with a seed, drafts change no token. Invariant: every sequence
gets at least one token, the one that it would get without drafts.

Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch

from firstlight.engine.messages import TokenLogprobs
from firstlight.engine.request import Sequence
from firstlight.engine.sampler import History, Sampler
from firstlight.engine.speculation.ahead import Ahead
from firstlight.engine.speculation.synthetic import Synthetic


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


def choose(
    sampler: Sampler,
    logits_LV: torch.Tensor,
    sequences: Rows[Sequence],
    synthetic: Synthetic | None = None,
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
    if synthetic is None and sampler.takes_largest(sequences):
        tokens = sampler.largest(logits_LV)
        return Chosen([verify(s.drafts, tokens[row:]) for s, row in zip(sequences, first_rows, strict=True)])
    return _in_order(sampler, logits_LV, sequences, first_rows, synthetic)


def _in_order(
    sampler: Sampler,
    logits_LV: torch.Tensor,
    sequences: Rows[Sequence],
    first_rows: list[int],
    synthetic: Synthetic | None,
) -> Chosen:
    """Place after place, because what is chosen next depends on what was accepted before."""
    chosen = Chosen([[] for _ in sequences])
    going_on = list(range(len(sequences)))
    place = 0
    while going_on:
        rows = [first_rows[index] + place for index in going_on]
        histories: list[History] = [Ahead.of(sequences[index], place) for index in going_on]
        sampled = sampler.sample(logits_LV[rows], histories)
        for number, logprobs in sampled.logprobs.items():
            chosen.logprobs.setdefault(going_on[number], []).append(logprobs)
        accepted: list[int] = []
        for index, token in zip(going_on, sampled.tokens, strict=True):
            drafts = sequences[index].drafts
            if synthetic is not None:
                token = synthetic.token(sequences[index], place, token)
            chosen.runs[index].append(token)
            if place < len(drafts) and drafts[place] == token:
                accepted.append(index)
        going_on = accepted
        place += 1
    return chosen
