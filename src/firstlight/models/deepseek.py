"""DeepSeek-V2 and V3, Kimi-K2, and the language model of Kimi-K2.5.

Latent attention, experts after some dense layers, and rotary pairs side by side.
"""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder, Parts
from firstlight.models.layers.latent import LatentAttention
from firstlight.models.layers.moe import sparse_mlp


def _attention(declare: Declaration, description: ModelDescription, layer: int) -> LatentAttention:
    return LatentAttention(declare, description, f"model.layers.{layer}.self_attn", layer)


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A DeepSeek or Kimi whose tensors are declared in `declare`."""
    return Decoder(declare, description, Parts(_attention, sparse_mlp()))
