"""The decoder-only transformer that the dense architectures share: pre-norm blocks over a residual stream.

An architecture's file states what is its own and returns a `Decoder`. Called by `engine.runner`.
Invariant: the residual stream is float32, whatever the layouts of the weights are.

Shapes: T tokens in the step, H hidden, L logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from firstlight.facts.description import ModelDescription
from firstlight.models.batch import ForwardBatch
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import Attention
from firstlight.models.layers.linear import Vector
from firstlight.models.layers.mlp import GatedMlp
from firstlight.models.layers.vocabulary import Embedding, Head
from firstlight.ops.contract import Tape


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, declare: Declaration, description: ModelDescription, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        hidden = description.hidden_size
        self._ops, self._eps = declare.ops, description.norm_eps
        self._input_norm = Vector(declare, f"{prefix}.input_layernorm.weight", hidden)
        self._attention = Attention(declare, description, f"{prefix}.self_attn", layer)
        self._post_norm = Vector(declare, f"{prefix}.post_attention_layernorm.weight", hidden)
        self._mlp = GatedMlp(declare, description, f"{prefix}.mlp", layer)

    def __call__(self, x_TH: torch.Tensor, batch: ForwardBatch) -> None:
        """Adds to the residual stream in place."""
        x_TH += self._attention(self._ops.rms_norm(x_TH, self._input_norm.values, self._eps), batch)
        x_TH += self._mlp(self._ops.rms_norm(x_TH, self._post_norm.values, self._eps))

    def record(self, tape: Tape) -> None:
        self._attention.record(tape, tape.norm(self._input_norm.values, self._eps))
        self._mlp.record(tape, tape.norm(self._post_norm.values, self._eps))


class Decoder:
    """Embedding, blocks, final norm, head. Declares its tensors when it is built."""

    def __init__(self, declare: Declaration, description: ModelDescription) -> None:
        self.description = description
        self._ops = declare.ops
        shape = (description.vocab_size, description.hidden_size)
        tied = description.tie_embeddings
        embedding = "model.embed_tokens.weight"
        self._head = Head(declare, embedding if tied else "lm_head.weight", shape, tied=tied)
        self._embedding = Embedding(declare, embedding, shape, self._head if tied else None)
        self._blocks: list[Block] = []
        for layer in range(description.num_layers):
            self._blocks.append(Block(declare, description, layer))
            declare.on_layer(layer + 1, description.num_layers)
        self._norm = Vector(declare, "model.norm.weight", description.hidden_size)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the wanted rows, float32 [L, V]."""
        x_TH = self._embedding(batch.tokens_T)  # noqa: N806 - shape suffix
        for block in self._blocks:
            block(x_TH, batch)
        wanted_LH = x_TH.index_select(0, batch.logit_rows_L)  # noqa: N806 - shape suffix
        return self._head(self._ops.rms_norm(wanted_LH, self._norm.values, self.description.norm_eps))

    def record(self, tape: Tape) -> None:
        """Takes down `__call__` on a tape."""
        self._embedding.record(tape)
        for layer, block in enumerate(self._blocks):
            tape.enter(layer)
            block.record(tape)
        normed = tape.norm(self._norm.values, self.description.norm_eps, of_logit_rows=True)
        self._head.record(tape, normed)


Architecture = Callable[[Declaration, ModelDescription], Decoder]
