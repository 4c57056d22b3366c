"""Captured states at half their size: int8 with one scale for each channel of each layer.

The first tokens of a document have values hundreds of times those of the others; these rows are kept as they
are, or they would leave the rest no bits. Invariant: what is written and read again differs from its origin
by half a step of its channel and bfloat16's rounding at most.

Shapes: I indices of a shard, C captured states, H hidden, E rows that are kept exactly.
"""

from __future__ import annotations

from pathlib import Path

import torch

from firstlight.base.errors import ModelFileError

LEVELS = 127
OUTLYING = 8.0  # times the median of the rows' largest values
NAMES = ("states_int8", "states_scale", "exact_rows", "exact_states")


def to_int8(states_ICH: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that stand for the states in a file."""
    wide = states_ICH.float()
    largest = wide.abs().amax(-1)
    outlying = (largest > OUTLYING * largest.median(0).values).any(1)
    exact = outlying.nonzero().squeeze(1)
    inner = torch.where(outlying[:, None, None], 0.0, wide)
    scale = (inner.abs().amax(0) / LEVELS).clamp(min=1e-12)
    return {
        "states_int8": (inner / scale).round().to(torch.int8),
        "states_scale": scale,
        "exact_rows": exact.int(),
        "exact_states": states_ICH[exact],
    }


def from_int8(tensors: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    """The states, bfloat16 [I, C, H]. Raises `ModelFileError` where a tensor is missing."""
    missing = [name for name in NAMES if name not in tensors]
    if missing:
        raise ModelFileError(
            f"{path}: the tensor {missing[0]} is missing.",
            "Remove this file and run the stage capture again.",
        )
    states = (tensors["states_int8"].float() * tensors["states_scale"]).to(torch.bfloat16)
    states[tensors["exact_rows"].long()] = tensors["exact_states"]
    return states


def storage_error(
    states_ICH: torch.Tensor,
    before: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """For each layer the relative error (root of mean squares) and the lowest cosine of a row.

    `before` are those of other shards: the worse one of each is kept.
    """
    stored = from_int8(to_int8(states_ICH), Path()).float()
    wide = states_ICH.float()
    relative = (stored - wide).square().mean((0, 2)).sqrt() / wide.square().mean((0, 2)).sqrt()
    cosine = torch.nn.functional.cosine_similarity(stored, wide, dim=-1).amin(0)
    found = {
        "relative": [round(float(value), 6) for value in relative],
        "lowest_cosine": [round(float(value), 6) for value in cosine],
    }
    if before is not None:
        for name, worse in (("relative", max), ("lowest_cosine", min)):
            found[name] = [worse(pair) for pair in zip(found[name], before[name], strict=True)]
    return found
