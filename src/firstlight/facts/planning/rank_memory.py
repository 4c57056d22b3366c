"""What a rank's memory goes to in a deployment on paper, whether it suffices, and what would help.

Invariant: the memory is divided by `memory.compute_budget`, as at a real start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from firstlight.base.errors import UsageError
from firstlight.facts.planning.decode_time import Rates
from firstlight.facts.planning.memory_budget import (
    BudgetLine,
    BudgetRequest,
    MemoryBudget,
    compute_budget,
    format_bytes,
    kv_bytes_per_token,
    kv_row_bytes,
    step_bytes,
)
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import kv_heads_of

GRAPH_LAYER_BYTES = 300_000  # of each captured step, for each layer: assumed, see `Device`
NUM_GRAPHS = 35
RUNTIME_BYTES = 2**30
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's GPU, and what a running engine takes of it beside weights and KV.

    `graph_bytes` (None: from the number of layers) and `runtime_bytes` (the CUDA context and buffers of
    collectives) are assumptions: no header tells them.
    """

    memory_bytes: int
    fraction: float
    graph_bytes: int | None = None
    runtime_bytes: int = RUNTIME_BYTES
    rates: Rates
    storage_bytes_per_s: float  # of the host


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is served. `max_model_len` 0: what fits, and no less than `context`, the length so far that decode
    times are for. `chance` is that of a draft to be accepted after those before it."""

    max_model_len: int = 0
    max_num_seqs: int = 256
    max_batched_tokens: int = 512
    page_size_tokens: int = 16
    kv_dtype: str = "bfloat16"
    context: int = 4096
    max_drafts: int = 5
    draft_vocabulary: int = 32000
    chance: float = 0.6
    num_sequences: int = 1  # in a step with drafts
    observed: tuple[int, float, float] | None = None  # drafts, accepted over drafted, gain

    @property
    def least_tokens(self) -> int:
        """That a rank must have room for."""
        return self.max_model_len or self.context


@dataclass(frozen=True)
class RankMemory:
    """Of the fullest rank."""

    weights: RankWeights
    device: Device
    load: Load

    @property
    def kv_token_bytes(self) -> int:
        """One token of KV in all layers."""
        outline, ranks = self.weights.outline, self.weights.ranks
        heads = max(kv_heads_of(outline.description, ranks, rank) for rank in range(ranks.num))
        return kv_bytes_per_token(
            outline.description, kv_row_bytes(outline.description, self.load.kv_dtype), heads
        )

    @property
    def weight_bytes(self) -> int:
        """Resident weights."""
        return self.weights.rank_bytes(self.weights.fullest_rank) + self.weights.tied_head_bytes

    @property
    def graph_bytes(self) -> int:
        """Of captured steps."""
        given, layers = self.device.graph_bytes, self.weights.outline.description.num_layers
        return NUM_GRAPHS * layers * GRAPH_LAYER_BYTES if given is None else given

    @property
    def activation_bytes(self) -> int:
        """Of the largest step, with its logits."""
        description = self.weights.outline.description
        num_heads = -(-description.num_heads // self.weights.ranks.num)
        return step_bytes(description, self.load.max_batched_tokens, self.load.max_num_seqs, num_heads)

    @property
    def planned_bytes(self) -> int:
        """That may be planned for."""
        return int(self.device.memory_bytes * self.device.fraction)

    @property
    def needed_bytes(self) -> int:
        """With as many tokens of KV as there must be room for."""
        pages = -(-self.load.least_tokens // self.load.page_size_tokens)
        return self.fixed_bytes + self.weight_bytes + pages * self.page_bytes

    @property
    def missing_bytes(self) -> int:
        """0: it fits."""
        return max(0, self.needed_bytes - self.planned_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Beside weights and KV."""
        return self.activation_bytes + self.graph_bytes + self.device.runtime_bytes

    @property
    def page_bytes(self) -> int:
        """Of the KV cache."""
        return self.kv_token_bytes * self.load.page_size_tokens

    def budget(self) -> MemoryBudget | None:
        """None: it does not fit."""
        if self.missing_bytes:
            return None
        most = self.load.max_model_len or self.weights.outline.description.max_position
        return compute_budget(
            BudgetRequest(
                available_bytes=self.device.memory_bytes,
                fraction=self.device.fraction,
                weight_bytes=self.weight_bytes,
                workspace_bytes=self.fixed_bytes,
                page_bytes=self.page_bytes,
                page_size_tokens=self.load.page_size_tokens,
                min_tokens=self.load.least_tokens,
                max_tokens=self.load.max_num_seqs * most,
            )
        )

    def lines(self, budget: MemoryBudget | None) -> tuple[BudgetLine, ...]:
        """Every use of memory; without a budget those that are needed, and what is missing."""
        tokens, sequences = self.load.max_batched_tokens, self.load.max_num_seqs
        first = (
            BudgetLine("weights", self.weight_bytes, "in the layout of the files"),
            BudgetLine(
                "activations",
                self.activation_bytes,
                f"a step of {tokens} tokens, logits of {sequences} sequences",
            ),
            BudgetLine("graphs", self.graph_bytes, self._graph_reason()),
            BudgetLine(
                "runtime",
                self.device.runtime_bytes,
                "CUDA context, buffers of collectives: assumed, --runtime",
            ),
        )
        if budget is not None:
            return (*first, *(line for line in budget.lines if line.name in ("kv cache", "free")))
        pages = -(-self.load.least_tokens // self.load.page_size_tokens)
        kv = BudgetLine("kv cache", pages * self.page_bytes, f"the least: {self.load.least_tokens} tokens")
        available = format_bytes(self.device.memory_bytes)
        why = f"of {format_bytes(self.planned_bytes)}: {self.device.fraction:.0%} of {available}"
        return (*first, kv, BudgetLine("free", -self.missing_bytes, why))

    def _graph_reason(self) -> str:
        if self.device.graph_bytes is not None:
            return "as given"
        return f"{NUM_GRAPHS} captured steps, {GRAPH_LAYER_BYTES / 1e6:g} MB a layer: assumed, --graphs"


def remedies(memory: RankMemory) -> list[str]:
    """Each alone would make it fit, as far as this arithmetic goes."""
    device, load = memory.device, memory.load
    found = []
    gib = math.ceil(memory.needed_bytes / device.fraction / 2**30)
    if memory.needed_bytes <= 0.95 * device.memory_bytes:
        share = math.ceil(100 * memory.needed_bytes / device.memory_bytes) / 100
        found.append(f"raise --memory-fraction to {share:.2f}")
    spare = memory.planned_bytes - memory.fixed_bytes - memory.weight_bytes
    if load.max_model_len and spare >= memory.page_bytes:
        tokens = spare // memory.page_bytes * load.page_size_tokens
        found.append(f"set --max-model-len to {tokens} or less")
    more = next((n for n in range(memory.weights.ranks.num + 1, MOST_RANKS + 1) if _fits(memory, n)), None)
    if more is not None:
        found.append(f"use --gpus {more}")
    found.append(f"take GPUs of {gib} GiB (--gpu-memory {gib}G)")
    found.append("use a more strongly quantised model")
    return found


def _fits(memory: RankMemory, num_ranks: int) -> bool:
    outline = memory.weights.outline
    try:
        weights = RankWeights(outline, replace(memory.weights.ranks, num=num_ranks))
    except UsageError:  # the model cannot be split so
        return False
    if outline.description.num_heads % num_ranks:
        return False
    return not replace(memory, weights=weights).missing_bytes
