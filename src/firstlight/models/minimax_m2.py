"""MiniMax-M2: grouped-query attention of which half of each head turns, q and k normalised over all heads, and
DeepSeek's choice of experts without groups and shared ones.
"""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder, Parts
from firstlight.models.layers.moe import MIXTRAL_NAMES, sparse_mlp


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A MiniMax-M2 whose tensors are declared in `declare`."""
    return Decoder(declare, description, Parts(mlp=sparse_mlp(MIXTRAL_NAMES)))
