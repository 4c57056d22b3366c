"""The decoder-only transformer that all architectures share: pre-norm blocks over a residual stream.

An architecture's file states what is its own, and returns a `Decoder`. Invariant: the residual stream is
float32, whatever the layouts of the weights are.

Shapes: T tokens in the step, H hidden, L logit rows, V vocabulary, C captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from firstlight.facts.description import ModelDescription
from firstlight.models.batch import ForwardBatch
from firstlight.models.declare import Declaration
from firstlight.models.layers.attention import Attention
from firstlight.models.layers.linear import Vector
from firstlight.models.layers.mlp import GatedMlp
from firstlight.models.layers.vocabulary import Embedding, Head
from firstlight.ops.contract import Tape
from firstlight.ops.step_clock import Kind


class AttentionLayer(Protocol):
    """What a block adds to the residual stream first; `record` takes it down with the addition."""

    def __call__(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...

    def record(self, tape: Tape, x: Any) -> None: ...


class MlpLayer(Protocol):
    """What a block adds second."""

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor: ...

    def record(self, tape: Tape, x: Any) -> None: ...


def _attention(declare: Declaration, description: ModelDescription, layer: int) -> AttentionLayer:
    return Attention(declare, description, f"model.layers.{layer}.self_attn", layer)


def _dense_mlp(declare: Declaration, description: ModelDescription, layer: int) -> MlpLayer:
    return GatedMlp(declare, description, f"model.layers.{layer}.mlp", layer)


@dataclass(frozen=True)
class Parts:
    """What an architecture's blocks are made of: makers of the layer of a number."""

    attention: Callable[[Declaration, ModelDescription, int], AttentionLayer] = _attention
    mlp: Callable[[Declaration, ModelDescription, int], MlpLayer] = _dense_mlp


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, declare: Declaration, description: ModelDescription, layer: int, parts: Parts) -> None:
        prefix = f"model.layers.{layer}"
        hidden = description.hidden_size
        self._ops, self._clock, self._eps = declare.ops, declare.group.clock, description.norm_eps
        self._input_norm = Vector(declare, f"{prefix}.input_layernorm.weight", hidden)
        self._attention = parts.attention(declare, description, layer)
        self._post_norm = Vector(declare, f"{prefix}.post_attention_layernorm.weight", hidden)
        self._mlp = parts.mlp(declare, description, layer)

    def __call__(self, x_TH: torch.Tensor, batch: ForwardBatch) -> None:
        """Adds to the residual stream in place."""
        x_TH += self._attention(self._normed(x_TH, self._input_norm), batch)
        x_TH += self._mlp(self._normed(x_TH, self._post_norm))

    def _normed(self, x_TH: torch.Tensor, weight: Vector) -> torch.Tensor:
        return self._clock.run(Kind.OTHER, self._ops.rms_norm, x_TH, weight.values, self._eps)

    def record(self, tape: Tape) -> None:
        self._attention.record(tape, tape.norm(self._input_norm.values, self._eps))
        self._mlp.record(tape, tape.norm(self._post_norm.values, self._eps))


class Decoder:
    """Embedding, blocks, final norm, head. Declares its tensors when it is built."""

    def __init__(
        self, declare: Declaration, description: ModelDescription, parts: Parts | None = None
    ) -> None:
        self.description = description
        self._ops, self._clock = declare.ops, declare.group.clock
        shape = (description.vocab_size, description.hidden_size)
        tied = description.tie_embeddings
        embedding = "model.embed_tokens.weight"
        self._head = Head(declare, embedding if tied else "lm_head.weight", shape, tied=tied)
        self._embedding = Embedding(declare, embedding, shape, self._head if tied else None)
        self._blocks: list[Block] = []
        for layer in range(description.num_layers):
            self._blocks.append(Block(declare, description, layer, parts or Parts()))
            declare.on_layer(layer + 1, description.num_layers)
        self._norm = Vector(declare, "model.norm.weight", description.hidden_size)
        self._places: dict[int, int] = {}

    def capture(self, layers: Sequence[int]) -> None:
        """From now on a step leaves these states: k is the residual stream after k blocks, before any norm.

        0 is the embeddings, the number of blocks the last state. Call before the first step.
        """
        assert all(0 <= layer <= len(self._blocks) for layer in layers), "a state of no block"
        self._places = {layer: place for place, layer in enumerate(layers)}

    @property
    def embedding(self) -> Embedding:
        """For a drafter, which embeds tokens as the target does."""
        return self._embedding

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the wanted rows, float32 [L, V]."""
        x_TH = self._clock.run(Kind.OTHER, self._embedding, batch.tokens_T)
        for layer, block in enumerate(self._blocks):
            self._keep(layer, x_TH, batch)
            block(x_TH, batch)
        self._keep(len(self._blocks), x_TH, batch)
        wanted_LH = x_TH.index_select(0, batch.logit_rows_L)
        eps = self.description.norm_eps
        return self._head(self._clock.run(Kind.OTHER, self._ops.rms_norm, wanted_LH, self._norm.values, eps))

    def record(self, tape: Tape) -> None:
        """Takes down `__call__` on a tape."""
        self._embedding.record(tape)
        for layer, block in enumerate(self._blocks):
            if layer in self._places:
                tape.capture(self._places[layer])
            tape.enter(layer)
            block.record(tape)
        if len(self._blocks) in self._places:
            tape.capture(self._places[len(self._blocks)])
        normed = tape.norm(self._norm.values, self.description.norm_eps, of_logit_rows=True)
        self._head.record(tape, normed)

    def _keep(self, layer: int, x_TH: torch.Tensor, batch: ForwardBatch) -> None:
        place = self._places.get(layer)
        if place is not None:
            assert batch.states_TCH is not None, "a step without room for its states"
            batch.states_TCH[:, place] = x_TH


Architecture = Callable[[Declaration, ModelDescription], Decoder]
