"""What `firstlight plan` predicts for the decode steps that were profiled: bytes over rates, and latencies.

Invariant: the arithmetic is `facts.planning.decode_time`'s; a rate that nobody gave is named as measured or
assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.engine.messages import Profile
from firstlight.facts.planning.all_reduce import LINKS, AllReduceTimes, Link, measured, modelled
from firstlight.facts.planning.decode_time import DecodeTimes, Rates
from firstlight.facts.planning.memory_budget import KV_VALUE_BYTES, kv_bytes_per_token, kv_row_bytes
from firstlight.facts.planning.outline import open_outline
from firstlight.facts.planning.rank_weights import RankWeights
from firstlight.facts.planning.sharding import EXPERTS, NORMS, ROUTER, Ranks, kv_heads_of
from firstlight.ops.step_clock import WORDS, Kind

# Between processes of one machine: assumed, where no times are given.
SHARED_MEMORY = Link("shared memory", 5e-6, 1e-6, 5e-6, 5e9)
GPU_BYTES_PER_S, GPU_LAYER_S = 1.8e12, 30e-6  # as `plan` has them
_KINDS = {EXPERTS: Kind.EXPERTS, ROUTER: Kind.EXPERTS, NORMS: Kind.OTHER}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the user gave, or None. `local_bytes_per_s`: of this machine's memory, if the server runs here."""

    model: str | None = None
    memory_bytes_per_s: float | None = None
    local_bytes_per_s: float | None = None
    layer_s: float | None = None
    all_reduce: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Prediction:
    """Seconds of a mean step by the words of `ops.step_clock`, and what they rest on."""

    kinds_s: dict[str, float]
    notes: tuple[str, ...]

    @property
    def total_s(self) -> float:
        """Of a step."""
        return sum(self.kinds_s.values())


def is_gpu(info: Mapping[str, Any]) -> bool:
    """Whether the server's engine runs on one."""
    return bool(info["config"]["engine"]["device"] == "cuda")


def predict(profile: Profile, info: Mapping[str, Any], given: Given) -> Prediction:
    """The mean over the profiled steps. Raises `FirstlightError` for a model that cannot be read here."""
    outline = open_outline(given.model or info["config"]["model"]["path"])
    description, engine = outline.description, info["config"]["engine"]
    ranks = Ranks(profile.num_ranks, bool(engine.get("expert_parallel")))
    notes: list[str] = []
    rates = Rates(_memory_rate(info, given, ranks.num, notes), _layer_s(info, given), wire_bytes=4)
    reduce = _all_reduce(info, given, ranks.num)
    if ranks.num > 1:
        notes.append(f"all-reduces: {reduce.explain()}{'' if given.all_reduce else ' (assumed)'}")
    heads = max(kv_heads_of(description, ranks, rank) for rank in range(ranks.num))
    kv_bytes = kv_bytes_per_token(description, kv_row_bytes(description, _kv_dtype(info)), heads)
    times = DecodeTimes(RankWeights(outline, ranks), rates, reduce, kv_bytes)
    sums = dict.fromkeys(WORDS, 0.0)
    for group in profile.groups:
        share = group.num_steps / profile.num_steps
        step = times.step(group.num_rows, group.num_sequences, round(group.context_tokens))
        for kind, seconds in _weights_s(times, group.num_rows).items():
            sums[kind] += share * seconds
        sums[Kind.ATTENTION] += share * step.kv_s
        sums[Kind.COLLECTIVES] += share * step.all_reduce_s
        sums[Kind.OTHER] += share * step.other_s
    return Prediction({WORDS[kind]: seconds for kind, seconds in sums.items()}, tuple(notes))


def _weights_s(times: DecodeTimes, num_rows: int) -> dict[Kind, float]:
    """Of the rank that reads most."""
    rank = max(range(times.weights.ranks.num), key=lambda rank: times.read_bytes(num_rows, rank))
    found: dict[Kind, float] = {}
    for name in times.weights.kinds:
        kind = _KINDS.get(name, Kind.MATRICES)
        seconds = times.kind_bytes(name, num_rows, rank) / times.rates.memory_bytes_per_s
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def _memory_rate(info: Mapping[str, Any], given: Given, num_ranks: int, notes: list[str]) -> float:
    """Of one rank: on a CPU they share it."""
    if given.memory_bytes_per_s is not None:
        notes.append(f"each rank reads {given.memory_bytes_per_s / 1e9:,.1f} GB/s (--memory-rate)")
        return given.memory_bytes_per_s
    if is_gpu(info) or given.local_bytes_per_s is None:
        notes.append(f"each rank reads {GPU_BYTES_PER_S / 1e9:,.0f} GB/s (assumed: give --memory-rate)")
        return GPU_BYTES_PER_S
    rate = given.local_bytes_per_s / num_ranks
    shared = f", shared by {num_ranks} ranks" if num_ranks > 1 else ""
    notes.append(f"memory reads {given.local_bytes_per_s / 1e9:,.1f} GB/s (measured here now{shared})")
    return rate


def _layer_s(info: Mapping[str, Any], given: Given) -> float:
    if given.layer_s is not None:
        return given.layer_s
    return GPU_LAYER_S if is_gpu(info) else 0.0


def _all_reduce(info: Mapping[str, Any], given: Given, num_ranks: int) -> AllReduceTimes:
    model = (
        modelled("ring", LINKS["pcie"], num_ranks)
        if is_gpu(info)
        else modelled("one-shot", SHARED_MEMORY, num_ranks)
    )
    return model if given.all_reduce is None else measured(given.all_reduce, model)


def _kv_dtype(info: Mapping[str, Any]) -> str:
    dtypes = info["startup_report"].get("kv_dtypes") or ["bfloat16"]
    return dtypes[0] if dtypes[0] in KV_VALUE_BYTES else "bfloat16"
