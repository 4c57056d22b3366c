"""Mistral: Llama's layers, and where the config says so a sliding window over the last tokens.

The window is a property of the attention rows: a token sees itself and the `sliding_window - 1` before it.
Some layers may see everything (`layer_types`, as in Ministral).
"""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Mistral whose tensors are declared in `declare`."""
    return Decoder(declare, description)
