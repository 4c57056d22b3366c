"""Mixtral: the attention of Mistral, and experts whose weights are a softmax over those that were chosen."""

from __future__ import annotations

from firstlight.facts.description import ModelDescription
from firstlight.models.declare import Declaration
from firstlight.models.decoder import Decoder, Parts
from firstlight.models.layers.moe import MIXTRAL_NAMES, sparse_mlp


def build(declare: Declaration, description: ModelDescription) -> Decoder:
    """A Mixtral whose tensors are declared in `declare`."""
    return Decoder(declare, description, Parts(mlp=sparse_mlp(MIXTRAL_NAMES)))
