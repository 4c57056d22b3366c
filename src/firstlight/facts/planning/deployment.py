"""A deployment on paper: memory of each rank, what it must read, how long steps take, when drafts pay.

Invariant: the memory is divided by `memory.compute_budget`, as at a real start.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from firstlight.base.errors import ResourceError
from firstlight.facts.planning.all_reduce import AllReduceTimes
from firstlight.facts.planning.decode_time import DecodeTimes, StepTime
from firstlight.facts.planning.memory_budget import BudgetLine, format_bytes
from firstlight.facts.planning.outline import Outline
from firstlight.facts.planning.rank_memory import Device, Load, RankMemory, remedies
from firstlight.facts.planning.rank_weights import KindWeights, LoaderCost, LoadWork, RankWeights
from firstlight.facts.planning.sharding import Ranks, replicates_kv
from firstlight.facts.planning.speculation_gain import BreakEven, DraftCost, break_even, observed_break_even

BATCHES = (1, 2, 4, 8, 16, 32)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. Bytes of a rank are those of the fullest one."""

    model: str
    architecture: str
    notes: tuple[str, ...]
    num_files: int
    num_tensors: int
    total_bytes: int
    num_ranks: int
    expert_parallel: bool
    weights: tuple[KindWeights, ...]
    rank_bytes: int  # of weights, resident
    least_rank_bytes: int
    kv_token_bytes: int
    memory: tuple[BudgetLine, ...]
    missing_bytes: int  # 0: it fits
    remedies: tuple[str, ...]
    kv_tokens: int
    max_model_len: int
    sequences_at_context: int
    loaders: tuple[LoaderCost, ...]
    load_work: LoadWork
    num_all_reduces: int
    message_bytes: int  # of one all-reduce of a token
    all_reduce_words: str
    token_bytes: int  # of weights, of the whole model, for one token
    token_bytes_by_kind: dict[str, int]
    growth: tuple[float, ...]  # bytes of weights for 1, 2, .. tokens, over those for one
    steps: tuple[StepTime, ...]
    drafts: tuple[BreakEven, ...]
    observed: BreakEven | None  # what a measured acceptance and gain imply


def make_plan(outline: Outline, ranks: Ranks, device: Device, load: Load, reduce: AllReduceTimes) -> Plan:
    """Plans; never raises for memory that does not suffice, but for a number of ranks that cannot be."""
    weights = RankWeights(outline, ranks)
    description = outline.description
    memory = RankMemory(weights, device, load)
    times = DecodeTimes(weights, device.rates, reduce, memory.kv_token_bytes)
    budget = memory.budget()
    kv_tokens = budget.num_tokens if budget else 0
    one = times.read_bytes(1)
    return Plan(
        model=outline.name,
        architecture=description.architecture,
        notes=(*outline.notes, *_notes(outline, weights)),
        num_files=outline.num_files,
        num_tensors=outline.num_tensors,
        total_bytes=outline.total_bytes,
        num_ranks=ranks.num,
        expert_parallel=ranks.expert_parallel,
        weights=tuple(weights.by_kind()),
        rank_bytes=memory.weight_bytes,
        least_rank_bytes=weights.least_bytes + weights.tied_head_bytes,
        kv_token_bytes=memory.kv_token_bytes,
        memory=memory.lines(budget),
        missing_bytes=0 if budget else memory.missing_bytes,
        remedies=() if budget else tuple(remedies(memory)),
        kv_tokens=kv_tokens,
        max_model_len=min(load.max_model_len or description.max_position, kv_tokens),
        sequences_at_context=min(load.max_num_seqs, kv_tokens // load.context),
        loaders=tuple(weights.loaders(device.storage_bytes_per_s)),
        load_work=weights.work(),
        num_all_reduces=times.num_all_reduces,
        message_bytes=times.message_bytes(1),
        all_reduce_words=reduce.explain(),
        token_bytes=one,
        token_bytes_by_kind={kind: times.kind_bytes(kind, 1) for kind in weights.kinds},
        growth=tuple(times.read_bytes(num) / one for num in range(1, load.max_drafts + 2)),
        steps=tuple(times.step(num, num, load.context) for num in BATCHES),
        drafts=tuple(_drafts(times, load)),
        observed=None if load.observed is None else observed_break_even(*load.observed, load.chance),
    )


def too_small(plan: Plan) -> ResourceError:
    """The error about a plan that does not fit."""
    sentence = f"{', or '.join(plan.remedies)}."
    return ResourceError(
        f"It does not fit: each rank lacks {_gib(plan.missing_bytes):.2f} GiB.",
        sentence[:1].upper() + sentence[1:],
    )


def _gib(nbytes: int) -> float:
    """As makers of GPUs count, and as the remedies beside it do; never 0 where something is lacking."""
    return max(nbytes / 2**30, 0.01)


def _drafts(times: DecodeTimes, load: Load) -> Sequence[BreakEven]:
    draft = DraftCost.eagle3(times, load.draft_vocabulary)
    scene = (load.num_sequences, load.context)
    return [break_even(times, draft, num, scene, load.chance) for num in range(1, load.max_drafts + 1)]


def _notes(outline: Outline, weights: RankWeights) -> list[str]:
    ranks, description = weights.ranks, outline.description
    found = []
    if replicates_kv(description, ranks):
        found.append(
            f"{description.num_kv_heads} key-value heads on {ranks.num} ranks: some hold the same ones; "
            f"firstlight itself takes no more than --tensor-parallel {description.num_kv_heads} here"
        )
    if description.latent is not None and ranks.num > 1:
        found.append("keys are latent: every rank keeps all of them")
    if weights.tied_head_bytes:
        found.append(
            "the head is the embedding: beside the whole table a rank keeps its "
            f"{format_bytes(weights.tied_head_bytes)} of it once more"
        )
    least = weights.least_bytes
    most = weights.rank_bytes(weights.fullest_rank)
    if most != least:
        found.append(f"ranks are unequal: weights of {format_bytes(least)} to {format_bytes(most)}")
    return found
