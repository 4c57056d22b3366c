"""Llama: Llama 2 and 3.x (with its rope scaling), SmolLM2, and everything with that config.

Grouped-query attention without biases (unless the config asks for them), rotary over the whole head.
"""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Llama whose tensors are declared in `declare`."""
    return Decoder(declare, description)
