"""silu and sigmoid whose bits do not depend on where a row lies in memory or how many rows there are.

PyTorch's vector and scalar versions differ in the last bit. Invariant: they run on pieces that start at a
vector and stay on one thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# torch splits element-wise work among threads above this many elements (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32768
VECTOR_ELEMENTS = 64


def silu(x_TO: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x); see the module."""
    return x_TO * sigmoid(x_TO)


def sigmoid(x_TO: torch.Tensor) -> torch.Tensor:
    """See the module."""
    num_rows, width = x_TO.shape
    padded = -(-width // VECTOR_ELEMENTS) * VECTOR_ELEMENTS
    x = F.pad(x_TO, (0, padded - width))
    step = max(1, GRAIN_ELEMENTS // padded)
    out = x.new_empty(num_rows, padded)
    for start in range(0, num_rows, step):
        out[start : start + step] = _sigmoid(x[start : start + step])
    return out[:, :width]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    if x.numel() <= GRAIN_ELEMENTS:
        return torch.sigmoid(x)
    # One row wider than the grain: in pieces, for the same reason.
    flat = x.reshape(-1)
    pieces = [torch.sigmoid(piece) for piece in flat.split(GRAIN_ELEMENTS)]
    return torch.cat(pieces).view_as(x)
