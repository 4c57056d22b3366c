"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from msgspec.structs import replace

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Qwen2 whose tensors are declared in `declare`."""
    return Decoder(declare, replace(description, attention_bias=True))
