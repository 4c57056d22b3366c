"""How long a decode step takes, and from which acceptance on drafts pay: arithmetic over bytes and latencies.

A step of few tokens is bound by memory and by latency, so compute is left out: the model holds for some tens
of tokens. Invariant: a step of more tokens never takes less time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.all_reduce import AllReduceTimes
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import EMBEDDING, EXPERTS, experts_of

REDUCTIONS_A_LAYER = 2  # after attention, and after the feed-forward layer


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step goes, in seconds, and what the busiest rank reads.

    Bounds: a step takes at least `total_s`, and `most_tokens_per_s` is what that would give.
    """

    num_tokens: int
    num_sequences: int
    weight_bytes: int
    weights_s: float
    kv_s: float
    all_reduce_s: float
    other_s: float
    total_s: float
    all_reduce_share: float
    most_tokens_per_s: float


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, what a layer takes beside bytes (launches, small kernels), and the
    bytes of a value in an all-reduce: firstlight sends float32, vLLM and SGLang 16 bits."""

    memory_bytes_per_s: float
    layer_s: float
    wire_bytes: int = 2


@dataclass(frozen=True)
class DecodeTimes:
    """Steps of a deployment. `kv_token_bytes` are one rank's."""

    weights: RankWeights
    rates: Rates
    all_reduce: AllReduceTimes
    kv_token_bytes: int

    @property
    def description(self) -> ModelDescription:
        """Of the model."""
        return self.weights.outline.description

    @property
    def num_all_reduces(self) -> int:
        """Of a step; none with one rank."""
        return REDUCTIONS_A_LAYER * self.description.num_layers if self.weights.ranks.num > 1 else 0

    def message_bytes(self, num_tokens: int) -> int:
        """Of one all-reduce."""
        return self.rates.wire_bytes * self.description.hidden_size * num_tokens

    def step(self, num_tokens: int, num_sequences: int = 1, context: int = 0) -> StepTime:
        """A step of so many tokens, over sequences of a length of `context`."""
        nbytes = max(self.read_bytes(num_tokens, rank) for rank in range(self.weights.ranks.num))
        weights_s = nbytes / self.rates.memory_bytes_per_s
        kv_s = num_sequences * context * self.kv_token_bytes / self.rates.memory_bytes_per_s
        reduce_s = self.num_all_reduces * self.all_reduce.of(self.message_bytes(num_tokens))
        other_s = self.description.num_layers * self.rates.layer_s
        total_s = weights_s + kv_s + reduce_s + other_s
        return StepTime(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            weight_bytes=nbytes,
            weights_s=weights_s,
            kv_s=kv_s,
            all_reduce_s=reduce_s,
            other_s=other_s,
            total_s=total_s,
            all_reduce_share=reduce_s / total_s,
            most_tokens_per_s=num_tokens / total_s,
        )

    def read_bytes(self, num_tokens: int, rank: int | None = None) -> int:
        """Bytes of weights that a step reads: on one rank, or of the whole model."""
        return sum(self.kind_bytes(kind, num_tokens, rank) for kind in self.weights.kinds)

    def kind_bytes(self, kind: str, num_tokens: int, rank: int | None = None) -> int:
        """The same of one kind. An embedding is looked up, unless it is the head too."""
        weights = self.weights
        nbytes = weights.total_bytes(kind) if rank is None else weights.rank_bytes(rank, kind)
        if kind == EMBEDDING:
            return self._head_bytes(nbytes, rank) if self.description.tie_embeddings else 0
        share = self._touched_share(num_tokens, rank) if kind == EXPERTS else 1.0
        return math.ceil(nbytes * share)

    def _head_bytes(self, embedding_bytes: int, rank: int | None) -> int:
        splits = rank is not None and not self.weights.ranks.splits_embedding
        return embedding_bytes // self.weights.ranks.num if splits else embedding_bytes

    def _touched_share(self, num_tokens: int, rank: int | None) -> float:
        """Of the experts' weights that a rank has: those that some token chose, if all are equally likely."""
        experts = self.description.experts
        if experts is None:
            return 1.0
        distinct = distinct_experts(experts.num, experts.num_chosen, num_tokens)
        ranks = self.weights.ranks
        if rank is None or not ranks.expert_parallel:
            return distinct / experts.num
        own = experts_of(self.description, ranks, rank)
        return min(own, busiest(distinct, ranks.num)) / own


def distinct_experts(num: int, num_chosen: int, num_tokens: int) -> float:
    """How many experts of a layer some of the tokens choose, on the average: real choices are alike, so this
    is the most."""
    return num * (1.0 - (1.0 - num_chosen / num) ** num_tokens)


def busiest(num_balls: float, num_bins: int) -> float:
    """How many of the balls lie, on the average, in the fullest bin; bins counted as independent."""
    balls, share = round(num_balls), 1.0 / num_bins
    expected, at_most = 0.0, 0.0
    for most in range(balls):
        at_most += math.comb(balls, most) * share**most * (1.0 - share) ** (balls - most)
        expected += 1.0 - min(1.0, at_most) ** num_bins
    return max(num_balls / num_bins, expected)
