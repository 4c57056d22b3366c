"""Qwen3-MoE: the attention of Qwen3, and experts chosen by a softmax over all of them."""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder, Parts
from firstlight.models.layers.moe import sparse_mlp


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Qwen3-MoE whose tensors are declared in `declare`."""
    return Decoder(declare, description, Parts(mlp=sparse_mlp()))
