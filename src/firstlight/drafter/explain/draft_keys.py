"""The draft keys in the engine's pages beside those that the reference makes of the same tokens.

Keys that verification left as they were drafted, or that a cached prefix never had, show here even where the
drafts happen to be the same. Invariant: each is compared at its own position.

Shapes: T tokens, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.drafter.explain.engine_run import Answered
from firstlight.drafter.explain.evidence import KeyMatch
from firstlight.models.eagle3 import Eagle3Drafter

PROMPT, VERIFIED, CACHED = "prompt", "verified", "cached"


@torch.no_grad()
def match_keys(drafter: Eagle3Drafter, answered: Sequence[tuple[Answered, torch.Tensor]]) -> list[KeyMatch]:
    """The relative distance of keys by the origin of their tokens; `answered` with the reference's states."""
    squares: dict[str, list[float]] = {}
    for answer, states in answered:
        if answer.keys is None:
            continue
        num = len(answer.keys)
        tokens = torch.tensor((answer.prompt + answer.tokens)[1 : num + 1])
        fused = drafter.fuse(states[:num, list(drafter.config.state_layers)])
        right = drafter.attending(fused, tokens, torch.arange(num)).keys
        errors = (answer.keys - right).square().sum((1, 2)).tolist()
        sizes = right.square().sum((1, 2)).tolist()
        for place, (error, size) in enumerate(zip(errors, sizes, strict=True), 1):
            row = squares.setdefault(_origin(answer, place), [0.0, 0.0, 0.0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + error, row[2] + size
    return [
        KeyMatch(origin=origin, num=int(num), relative_l2=(error / max(size, 1e-9)) ** 0.5)
        for origin, (num, error, size) in sorted(squares.items())
    ]


def _origin(answer: Answered, place: int) -> str:
    """Of the token at a place: keys of its slot were written with it.

    Behind a cached prefix the rest of the prompt counts as cached, too: a page that becomes equal to a cached
    one is given up for it, with the keys that were there.
    """
    if place >= len(answer.prompt):
        return VERIFIED
    return CACHED if answer.num_cached else PROMPT
