"""Models with weights that are no numbers: a token's row of the embedding, which touches only who says it.

Used by tests of what becomes of such requests, and of the others beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING = "model.embed_tokens.weight"


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> Path:
    """Changes a tensor of a folder of one file in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def damage_token(folder: Path, token: int) -> Path:
    """From now on this token's embedding is NaN."""
    return change_tensor(folder, EMBEDDING, lambda values: values[token].fill_(torch.nan))


def overflow_token(folder: Path, token: int) -> Path:
    """From now on this token's values in the first layer do not fit into float16; all weights are numbers."""

    def alone(values: torch.Tensor) -> None:
        values[:, 0] = 0.0
        values[token] = 0.0
        values[token, 0] = 1.0

    change_tensor(folder, EMBEDDING, alone)
    return change_tensor(
        folder, "model.layers.0.self_attn.v_proj.weight", lambda values: values[:, 0].fill_(1e6)
    )
