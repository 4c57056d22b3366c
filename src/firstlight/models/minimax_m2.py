"""MiniMax-M2: a part of each head turns, q and k are normalised over all heads, and experts are chosen as
DeepSeek does, without groups and shared ones.
"""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder, Parts
from firstlight.models.layers.moe import MIXTRAL_NAMES, sparse_mlp


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A MiniMax-M2 whose tensors are declared in `declare`."""
    return Decoder(declare, description, Parts(mlp=sparse_mlp(MIXTRAL_NAMES)))
