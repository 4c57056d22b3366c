"""The drafter's tensors as the engine holds them beside those of the file.

Invariant: the file is read anew, tensor by tensor, by its own names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from firstlight.drafter.explain.evidence import WeightMatch
from firstlight.drafter.target import Ends
from firstlight.engine.speculation.drafter import Drafter
from firstlight.loading.tensor_file import read_tensor_file
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_config import file_name
from firstlight.models.eagle3_file import EMBEDDING

MAX_DIFFERENCE = 0.02  # of a tensor's norm: layouts that round stay below


def compare_weights(served: Drafter | None, folder: Path, ends: Ends) -> list[WeightMatch] | None:
    """The tensors that are others; None where the engine's drafter does not show its weights."""
    held = _held(served)
    if held is None:
        return None
    files = [read_tensor_file(path) for path in sorted(folder.glob("*.safetensors"))]
    stored = {_short(name): values for tensors in files for name, values in tensors.items()}
    own = dict(held.named_parameters()) | {EMBEDDING: held.embed(torch.arange(len(ends.embedding)))}
    targets = {
        EMBEDDING: ends.embedding,
        "lm_head.weight": ends.head[held.target_ids_R],
        "norm.weight": ends.norm,
    }
    found = []
    for name, values in own.items():
        expected = stored.get(_short(file_name(name)), ends.embedding if name == EMBEDDING else None)
        if expected is None or expected.shape != values.shape:
            continue
        gap = _gap(values, expected)
        if gap > MAX_DIFFERENCE:
            target = targets.get(name)
            is_target = target is not None and target.shape == values.shape and _gap(values, target) < 1e-3
            found.append(WeightMatch(name=name, relative_difference=gap, is_the_target_s=is_target))
    return found


def _held(served: Drafter | None) -> Eagle3Drafter | None:
    """The drafter inside of the engine's, wherever it keeps it."""
    for holder in (served, getattr(served, "_layer", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if isinstance(value, Eagle3Drafter):
                return value
    return None


def _short(name: str) -> str:
    """A tensor's last two parts: the layer's prefix differs from dialect to dialect."""
    return ".".join(name.split(".")[-2:])


def _gap(values: torch.Tensor, expected: torch.Tensor) -> float:
    wide = expected.float()
    return float((values.detach().float() - wide).norm() / wide.norm().clamp(min=1e-9))
