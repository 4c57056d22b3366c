"""Qwen3, dense: no biases; each head of q and k is RMS-normalised before the rotary embedding."""

from __future__ import annotations

from msgspec.structs import replace

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Qwen3 whose tensors are declared in `declare`."""
    return Decoder(declare, replace(description, qk_norm=True))
