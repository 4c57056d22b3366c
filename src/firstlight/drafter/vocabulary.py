"""The draft vocabulary: the tokens that the target's answers use most.

Called by `train`. Invariant: ids ascend and none occurs twice; end tokens, control tokens and single digits
are always among them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from firstlight.base.errors import UsageError
from firstlight.drafter.target import Target

MAX_CONTROL_TOKENS = 64


def build_vocabulary(counts_V: torch.Tensor, size: int, always: Iterable[int]) -> torch.Tensor:  # noqa: N803
    """Target ids int64 [size], ascending: `always`, then the most frequent, then the lowest of the rest."""
    vocab_size = len(counts_V)
    if not 0 < size <= vocab_size:
        raise UsageError(
            f"A draft vocabulary of {size} does not fit a target with {vocab_size} tokens.",
            f"Give a number from 1 to {vocab_size}.",
        )
    ranks = counts_V.double()
    # Of equally frequent tokens the lower id, which a tokenizer that merges pairs learned earlier.
    ranks -= torch.arange(vocab_size) / (2 * vocab_size)
    ranks[torch.tensor(sorted(set(always)), dtype=torch.int64)] = float("inf")
    return ranks.topk(size).indices.sort().values


def tokens_to_keep(target: Target) -> set[int]:
    """End tokens, the first control tokens, and the tokens of single digits."""
    keep = set(target.checkpoint.description.eos_token_ids)
    for digit in "0123456789":
        ids = target.text.encode(digit, add_special_tokens=False)
        if len(ids) == 1:
            keep.add(ids[0])
    rendered = (
        target.text.render_chat([{"role": "user", "content": "1"}]) if target.text.has_chat_template else ""
    )
    keep |= set(target.text.encode(rendered, add_special_tokens=False)[:MAX_CONTROL_TOKENS])
    return keep


def coverage(counts_V: torch.Tensor, ids_R: torch.Tensor) -> float:  # noqa: N803
    """The share of counted tokens that the draft vocabulary has."""
    total = float(counts_V.sum())
    return float(counts_V[ids_R].sum()) / total if total else 0.0
