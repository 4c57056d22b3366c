"""From logits to tokens, for all sequences of a step at once. Runs on rank 0.

Called by `EngineCore` with one row of logits for each sequence that gets a token. The order is: penalties,
logit bias, minimum length (here a grammar will mask, too), log-probabilities, temperature, top-k, top-p,
min-p, draw. Invariant: a row's token depends on its own logits, parameters, seed and position only.

Shapes: L rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch

from firstlight.engine.messages import TokenLogprobs
from firstlight.engine.noise import gumbel, stream_key
from firstlight.engine.request import NO_TOKEN, Sequence

# Truncated sampling looks at this many best tokens first; only where they do not reach top-p, at all of them.
# Fixed, so that a row's sums are made in the same order in every batch.
NUM_CANDIDATES = 1024
# Below it a quotient of logits would overflow float32 and lose its order; the draw is as good as greedy here.
MIN_TEMPERATURE = 1e-6


@dataclass
class Sampled:
    """`tokens[i]` is for row i: `NO_TOKEN` where its logits are not numbers."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """See the module."""

    @torch.inference_mode()
    def sample(self, logits_LV: torch.Tensor, sequences: Rows[Sequence]) -> Sampled:
        """Chooses a token for each row. May change the logits in place."""
        for row, sequence in enumerate(sequences):
            if _is_adjusted(sequence):
                adjust(logits_LV[row], sequence)
        best, tokens_L = logits_LV.max(-1)
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
        if drawn:
            tokens_L = tokens_L.clone()
            tokens_L[drawn] = draw(logits_LV[drawn], [sequences[row] for row in drawn])
        sampled = Sampled(tokens_L.tolist())
        for row, value in enumerate(best.tolist()):
            if not math.isfinite(value):
                sampled.tokens[row] = NO_TOKEN
        for row, sequence in enumerate(sequences):
            if sequence.params.logprobs is not None and sampled.tokens[row] != NO_TOKEN:
                sampled.logprobs[row] = token_logprobs(
                    logits_LV[row], sampled.tokens[row], sequence.params.logprobs
                )
        return sampled


def adjust(logits_V: torch.Tensor, sequence: Sequence) -> None:
    """Penalties, bias and minimum length of one row, in place."""
    params = sequence.params
    if sequence.output_counts is not None:
        _penalise(logits_V, sequence)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
    if sequence.num_output < params.min_tokens and sequence.end_ids:
        logits_V[list(sequence.end_ids)] = -torch.inf


def draw(logits_LV: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """A token for each row, by temperature, truncation and seeded Gumbel noise; int64 [L]."""
    device = logits_LV.device
    temperatures = torch.tensor(
        [max(s.params.temperature, MIN_TEMPERATURE) for s in sequences], dtype=torch.float32, device=device
    )
    scaled_LV = logits_LV / temperatures[:, None]
    keys = [stream_key(s.params.seed or 0, len(s.tokens)) for s in sequences]
    truncated = [_is_truncated(sequence) for sequence in sequences]
    tokens_L = torch.empty(len(sequences), dtype=torch.int64, device=device)
    ids_V = torch.arange(scaled_LV.shape[1], dtype=torch.int32, device=device)
    for row in (row for row, is_cut in enumerate(truncated) if not is_cut):
        # Row by row: the dozen passes over one row stay in the cache.
        tokens_L[row] = gumbel([keys[row]], ids_V)[0].add_(scaled_LV[row]).argmax()
    cut = [row for row, is_cut in enumerate(truncated) if is_cut]
    if cut:
        tokens_L[cut] = _draw_truncated(
            scaled_LV[cut], [sequences[row] for row in cut], [keys[row] for row in cut]
        )
    return tokens_L


def token_logprobs(logits_V: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the adjusted distribution: of the token, its rank, and the `num_top` likeliest."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    mine = float(logprobs_V[token])
    rank = int((logprobs_V > mine).sum()) + 1
    values, ids = (
        logprobs_V.topk(min(num_top, len(logprobs_V))) if num_top else (torch.empty(0), torch.empty(0))
    )
    return TokenLogprobs(token, mine, rank, list(zip(ids.tolist(), values.tolist(), strict=True)))


def _draw_truncated(
    scaled_LV: torch.Tensor, sequences: Rows[Sequence], keys: list[tuple[int, int]]
) -> torch.Tensor:
    vocabulary = scaled_LV.shape[1]
    params = [sequence.params for sequence in sequences]
    few = min(NUM_CANDIDATES, vocabulary)
    enough = torch.tensor([p.top_k <= few for p in params])
    values_LC, ids_LC = scaled_LV.topk(few, -1)
    chosen, reached = _choose(scaled_LV, values_LC, ids_LC, sequences, keys)
    again = [row for row, ok in enumerate((enough & reached.cpu()).tolist()) if not ok]
    if again and few < vocabulary:
        rows = scaled_LV[again]
        values, ids = rows.sort(-1, descending=True)
        chosen[again], _ = _choose(
            rows, values, ids, [sequences[row] for row in again], [keys[row] for row in again]
        )
    return chosen


def _choose(
    scaled_LV: torch.Tensor,
    values_LC: torch.Tensor,
    ids_LC: torch.Tensor,
    sequences: Rows[Sequence],
    keys: list[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among sorted candidates; also whether each row's candidates cover its truncated distribution."""
    device = values_LC.device
    params = [sequence.params for sequence in sequences]
    num = values_LC.shape[1]
    top_k = torch.tensor([p.top_k or scaled_LV.shape[1] for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], device=device)
    min_p = torch.tensor([p.min_p for p in params], device=device)
    kept = torch.arange(num, device=device) < top_k[:, None]
    # Top-p counts probabilities among the top-k, as if renormalised. By log_softmax, because logsumexp splits
    # a long single row among threads: its bits would tell whether the row was alone.
    among = values_LC.masked_fill(~kept, -torch.inf).log_softmax(-1)
    overall = scaled_LV.log_softmax(-1).gather(1, ids_LC)
    shares = torch.where((top_k < scaled_LV.shape[1])[:, None], among, overall).exp()
    before = shares.cumsum(-1) - shares
    kept &= (before < top_p[:, None]) & (shares >= min_p[:, None] * shares[:, :1])
    kept[:, 0] = True
    # Covered if something was cut off before the end of the candidates: everything after it is cut off too.
    reached = ~kept[:, -1] | torch.tensor(num == scaled_LV.shape[1], device=device)
    noisy = values_LC.masked_fill(~kept, -torch.inf) + gumbel(keys, ids_LC)
    return ids_LC.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1), reached


def _penalise(logits_V: torch.Tensor, sequence: Sequence) -> None:
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


def _is_adjusted(sequence: Sequence) -> bool:
    params = sequence.params
    below_minimum = params.min_tokens > 0 and sequence.num_output < params.min_tokens
    return sequence.output_counts is not None or bool(params.logit_bias) or below_minimum


def _is_truncated(sequence: Sequence) -> bool:
    params = sequence.params
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
