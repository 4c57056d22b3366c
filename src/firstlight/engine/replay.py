"""The replay seam: how a forward pass reaches the device. Eagerly here; recorded once and replayed elsewhere.

The runner calls `run` for every step. `CudaGraphReplay` records decode steps of a few batch sizes; recorded
steps of our own CPU kernels will join behind the same call. Invariant: a replay gives what the eager pass
gives.
"""

from __future__ import annotations

from typing import Protocol

import torch

from firstlight.models.batch import ForwardBatch
from firstlight.models.decoder import Decoder


class Replay(Protocol):
    """Owns the model of a rank."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [L, V]. The result may be overwritten by the next call."""
        ...


class EagerReplay:
    """Runs the model's Python every time."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model(batch)
