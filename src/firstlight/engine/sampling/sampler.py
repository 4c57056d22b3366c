"""From logits to tokens, for all sequences of a step at once. Runs on rank 0.

The order is: penalties, logit bias, minimum length (here a grammar will mask, too), log-probabilities,
temperature, top-k, top-p, min-p, draw. Invariant: a row's token depends on its own logits, parameters, seed
and position only.

Shapes: L rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from firstlight.engine.messages import TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.engine.sampling.noise import gumbel, stream_key
from firstlight.engine.scheduler.sequence import NO_TOKEN
from firstlight.ops.selection import Selection, TorchSelection

# Truncated sampling looks at this many best tokens first; only where they do not reach top-p, at all of them.
# Fixed, so that a row's sums are made in the same order in every batch.
NUM_CANDIDATES = 1024
# Below it a quotient of logits would overflow float32 and lose its order; the draw is as good as greedy here.
MIN_TEMPERATURE = 1e-6


class History(Protocol):
    """What comes before the token that is chosen: a `Sequence`, or one with some of its drafts."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def output_counts(self) -> Counter[int] | None: ...


@dataclass
class Sampled:
    """`tokens[i]` is for row i: `NO_TOKEN` where its logits are not numbers."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Draw(NamedTuple):
    """A row that is not greedy; `key` of its noise."""

    row: int
    temperature: float
    params: SamplingParams
    key: tuple[int, int]


class Sampler:
    """See the module."""

    def __init__(self, selection: Selection | None = None) -> None:
        self._selection = selection or TorchSelection()

    @staticmethod
    def takes_largest(sequences: Rows[History]) -> bool:
        """Whether every row's token is simply its largest logit."""
        return all(sequence.params.greedy and not needs_values(sequence) for sequence in sequences)

    def largest(self, logits_LV: torch.Tensor) -> list[int]:
        """The token of each row where `takes_largest`."""
        return _only_numbers(*self._selection.largest(logits_LV))

    def sample(self, logits_LV: torch.Tensor, sequences: Rows[History]) -> Sampled:
        """Chooses a token for each row. May change the logits in place."""
        if self.takes_largest(sequences):
            return Sampled(self.largest(logits_LV))
        return self._sample(logits_LV, sequences)

    @torch.inference_mode()
    def _sample(self, logits_LV: torch.Tensor, sequences: Rows[History]) -> Sampled:
        for row, sequence in enumerate(sequences):
            if _is_adjusted(sequence):
                adjust(logits_LV[row], sequence)
        best, tokens = self._selection.largest(logits_LV)
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
        if drawn:
            chosen = draw(logits_LV, drawn, [sequences[row] for row in drawn], self._selection)
            for row, token in zip(drawn, chosen, strict=True):
                tokens[row] = token
        sampled = Sampled(_only_numbers(best, tokens))
        for row, sequence in enumerate(sequences):
            if sequence.params.logprobs is not None and sampled.tokens[row] != NO_TOKEN:
                sampled.logprobs[row] = token_logprobs(
                    logits_LV[row], sampled.tokens[row], sequence.params.logprobs
                )
        return sampled


def needs_values(sequence: History) -> bool:
    """Whether a greedy row needs more of its logits than the place of the largest."""
    return sequence.params.logprobs is not None or _is_adjusted(sequence)


def _only_numbers(best: list[float], tokens: list[int]) -> list[int]:
    return [token if math.isfinite(value) else NO_TOKEN for value, token in zip(best, tokens, strict=True)]


def adjust(logits_V: torch.Tensor, sequence: History) -> None:
    """Penalties, bias and minimum length of one row, in place."""
    params = sequence.params
    if sequence.output_counts is not None:
        _penalise(logits_V, sequence)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
    if sequence.num_output < params.min_tokens and sequence.end_ids:
        logits_V[list(sequence.end_ids)] = -torch.inf


def draw(
    logits_LV: torch.Tensor, rows: list[int], sequences: Rows[History], selection: Selection
) -> list[int]:
    """A token for each of `rows`, by temperature, truncation and seeded Gumbel noise."""
    temperatures = [max(s.params.temperature, MIN_TEMPERATURE) for s in sequences]
    draws = [
        Draw(row, temperature, s.params, stream_key(s.params.seed or 0, s.num_tokens))
        for row, temperature, s in zip(rows, temperatures, sequences, strict=True)
    ]
    tokens: dict[int, int] = {}
    whole = [one for one in draws if not _is_truncated(one.params)]
    if whole:
        ids_V = torch.arange(logits_LV.shape[1], dtype=torch.int32, device=logits_LV.device)
        for one in whole:
            # Row by row: the dozen passes over one row stay in the cache.
            scaled_V = logits_LV[one.row] / one.temperature
            tokens[one.row] = int(gumbel([one.key], ids_V)[0].add_(scaled_V).argmax())
    cut = [one for one in draws if _is_truncated(one.params)]
    if cut:
        tokens.update(_draw_truncated(logits_LV, cut, selection))
    return [tokens[row] for row in rows]


def token_logprobs(logits_V: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the adjusted distribution: of the token, its rank, and the `num_top` likeliest."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    mine = float(logprobs_V[token])
    rank = int((logprobs_V > mine).sum()) + 1
    values, ids = (
        logprobs_V.topk(min(num_top, len(logprobs_V))) if num_top else (torch.empty(0), torch.empty(0))
    )
    return TokenLogprobs(token, mine, rank, list(zip(ids.tolist(), values.tolist(), strict=True)))


def _draw_truncated(logits_LV: torch.Tensor, draws: list[Draw], selection: Selection) -> dict[int, int]:
    few = min(NUM_CANDIDATES, logits_LV.shape[1])
    chosen, reached = _choose(logits_LV, draws, selection, few)
    tokens = {one.row: token for one, token in zip(draws, chosen, strict=True)}
    again = [one for one, ok in zip(draws, reached, strict=True) if not (ok and one.params.top_k <= few)]
    if again and few < logits_LV.shape[1]:
        chosen, _ = _choose(logits_LV, again, selection, logits_LV.shape[1])
        tokens |= {one.row: token for one, token in zip(again, chosen, strict=True)}
    return tokens


def _choose(
    logits_LV: torch.Tensor, draws: list[Draw], selection: Selection, num: int
) -> tuple[list[int], list[bool]]:
    """Draws among the first `num`; also whether they cover each row's truncated distribution."""
    device, vocabulary = logits_LV.device, logits_LV.shape[1]
    rows, temperatures = [one.row for one in draws], [one.temperature for one in draws]
    values_LC, ids_LC = selection.first(logits_LV, rows, temperatures, num)
    top_k = torch.tensor([one.params.top_k or vocabulary for one in draws], device=device)
    top_p = torch.tensor([one.params.top_p for one in draws], device=device)
    min_p = torch.tensor([one.params.min_p for one in draws], device=device)
    kept = torch.arange(num, device=device) < top_k[:, None]
    # Top-p counts probabilities among the top-k, as if renormalised. By log_softmax, because logsumexp splits
    # a long single row among threads: its bits would tell whether the row was alone.
    shares = values_LC.masked_fill(~kept, -torch.inf).log_softmax(-1)
    without_k = [n for n, one in enumerate(draws) if not 0 < one.params.top_k < vocabulary]
    if without_k:
        by = torch.tensor([temperatures[n] for n in without_k], device=device)
        scaled = logits_LV[[rows[n] for n in without_k]] / by[:, None]
        shares[without_k] = scaled.log_softmax(-1).gather(1, ids_LC[without_k])
    shares = shares.exp_()
    before = shares.cumsum(-1) - shares
    kept &= (before < top_p[:, None]) & (shares >= min_p[:, None] * shares[:, :1])
    kept[:, 0] = True
    # Covered if something was cut off before the end of the candidates: everything after it is cut off too.
    reached = [num == vocabulary or not last for last in kept[:, -1].tolist()]
    noisy = values_LC.masked_fill_(~kept, -torch.inf) + gumbel([one.key for one in draws], ids_LC)
    return ids_LC.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1).tolist(), reached


def _penalise(logits_V: torch.Tensor, sequence: History) -> None:
    params, counts = sequence.params, sequence.output_counts
    assert counts is not None, "penalties need counts"
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array(sequence.tokens))).to(logits_V.device)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(counts), device=logits_V.device)
        amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits_V.device)
        logits_V[ids] -= amounts * params.frequency_penalty + params.presence_penalty


def _is_adjusted(sequence: History) -> bool:
    params = sequence.params
    below_minimum = params.min_tokens > 0 and sequence.num_output < params.min_tokens
    return sequence.output_counts is not None or bool(params.logit_bias) or below_minimum


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
