"""Sampling in plain numpy, float64, one row at a time: what the sampler is compared with.

Written from the definition of each parameter, not from the sampler. Only the noise is shared, so that the
same draw can be expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from firstlight.engine.messages import Submit
from firstlight.engine.params import SamplingParams
from firstlight.engine.sampling.noise import gumbel, stream_key
from firstlight.engine.scheduler.sequence import Sequence

END = 3  # the model's end token

Logits = np.ndarray[Any, np.dtype[np.float64]]


def sequence(prompt: list[int], output: list[int], **params: Any) -> Sequence:
    """A running sequence whose next token is to be sampled."""
    submit = Submit("r", prompt, SamplingParams(**{"seed": 0, **params}))
    made = Sequence(submit, 0, frozenset({END}), 10_000)
    made.tokens.extend(output)
    if made.output_counts is not None:
        made.output_counts.update(output)
    return made


def adjusted(logits: Logits, item: Sequence) -> Logits:
    """After penalties, bias and minimum length."""
    params, values = item.params, logits.copy()
    output = item.tokens[item.num_prompt :]
    for token in set(item.tokens):
        positive = values[token] > 0
        factor = params.repetition_penalty
        values[token] = values[token] / factor if positive else values[token] * factor
    for token in set(output):
        values[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(output) < params.min_tokens:
        values[list(item.end_ids)] = -np.inf
    return values


def kept_tokens(values: Logits, params: SamplingParams) -> list[int]:
    """The tokens that may be drawn, best first, from adjusted logits."""
    scaled = values / params.temperature
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    shares = np.exp(scaled[order] - scaled[order[0]])
    shares /= shares.sum()
    before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
    kept = (before < params.top_p) & (shares >= params.min_p * shares[0])
    kept[0] = True
    return [int(token) for token, keep in zip(order, kept, strict=True) if keep]


def choose(logits: Logits, item: Sequence) -> int:
    """The token that the sampler must choose."""
    params = item.params
    values = adjusted(logits, item)
    if params.temperature == 0.0:
        return int(values.argmax())
    kept = kept_tokens(values, params)
    key = stream_key(params.seed or 0, len(item.tokens))
    noise = gumbel([key], torch.tensor(kept))[0].double().numpy()
    return kept[int((values[kept] / params.temperature + noise).argmax())]


def log_shares(values: Logits) -> Logits:
    """Log-probabilities of adjusted logits."""
    top = values.max()
    return values - top - np.log(np.exp(values - top).sum())
