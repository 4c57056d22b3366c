"""How tensors fall to the ranks of a deployment: which are split, along what, and what a rank keeps of each.

Torch-free arithmetic over names and shapes. Invariant: at one rank everything is kept, and the shares of a
split tensor add up to the tensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from firstlight.base.errors import UsageError
from firstlight.facts.description import ModelDescription
from firstlight.facts.planning.tensor_groups import TensorGroup

BLOCK_VALUES = 32  # inner widths are shared out in whole blocks of the quantised formats, where they go
EXPERTS, SHARED_EXPERTS, ROUTER = "routed experts", "shared experts", "router"
ATTENTION, DENSE = "attention", "dense feed-forward"
EMBEDDING, HEAD, NORMS = "embedding", "output head", "norms"
KINDS = (EXPERTS, ATTENTION, SHARED_EXPERTS, DENSE, ROUTER, EMBEDDING, HEAD, NORMS)

_HEAD_ROWS = ("q_proj", "q_b_proj", "kv_b_proj")
_KV_ROWS = ("k_proj", "v_proj")
_INNER_ROWS, _INNER_COLUMNS = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")
_ROUTER = re.compile(r"\.(?:mlp|block_sparse_moe)\.(?:gate\.|e_score_correction_bias)")
_TRANSPOSED = ("qweight", "qzeros", "scales")  # of AWQ and GPTQ: inputs come first
_NEVER_SPLIT = ("weight_shape", "input_scale", "input_global_scale", "weight_scale_2", "g_idx")


@dataclass(frozen=True)
class Ranks:
    """A deployment's ranks on one host. `splits_embedding`: as vLLM and SGLang do; firstlight keeps it
    whole."""

    num: int = 1
    expert_parallel: bool = False
    splits_embedding: bool = False


@dataclass(frozen=True)
class Share:
    """What one rank keeps of a group of tensors.

    `num_pieces` contiguous byte ranges of `piece_bytes` each make up each of `num_tensors` tensors.
    """

    num_tensors: int
    num_pieces: int
    piece_bytes: int

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self.num_tensors * self.num_pieces * self.piece_bytes


@dataclass(frozen=True)
class Bounds:
    """Half-open, of `total` equal parts of a dimension."""

    start: int
    stop: int
    total: int

    @property
    def part(self) -> Fraction:
        """Of the dimension."""
        return Fraction(self.stop - self.start, self.total)


def split_evenly(total: int, unit: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The half-open share of `rank` when `total` is split in whole units; early ranks get the larger shares.

    9 heads for two ranks of 3 kv groups: `split_evenly(9, 3, 0, 2)` is (0, 6). Raises `UsageError` when a
    rank would get nothing.
    """
    num_units, rest = divmod(total, unit)
    if rest or num_units < num_ranks:
        raise UsageError(
            f"{total} cannot be split over {num_ranks} ranks in whole units of {unit}.",
            f"Use --tensor-parallel {max(1, num_units)} or less.",
        )
    share, extra = divmod(num_units, num_ranks)
    start = rank * share + min(rank, extra)
    return start * unit, (start + share + (rank < extra)) * unit


def kind_of(name: str) -> str:
    """Which part of the model a tensor belongs to; one of `KINDS`."""
    if ".shared_expert" in name:
        return SHARED_EXPERTS
    if ".experts." in name:
        return EXPERTS
    if _ROUTER.search(name):
        return ROUTER
    if ".self_attn." in name:
        return ATTENTION
    if ".mlp." in name:
        return DENSE
    if name.startswith("lm_head."):
        return HEAD
    return EMBEDDING if ".embed_tokens." in name else NORMS


def replicates_kv(description: ModelDescription, ranks: Ranks) -> bool:
    """Whether there are fewer key-value heads than ranks, so that some ranks hold the same ones."""
    return description.latent is None and description.num_kv_heads < ranks.num


def kv_heads_of(description: ModelDescription, ranks: Ranks, rank: int) -> int:
    """How many rows of keys a rank keeps for each token and layer; of a latent one, on every rank."""
    if description.latent is not None:
        return 1
    bounds = _kv_heads(description, ranks, rank)
    return bounds.stop - bounds.start


def experts_of(description: ModelDescription, ranks: Ranks, rank: int) -> int:
    """How many experts of a layer lie, whole or in part, on a rank."""
    experts = description.experts
    if experts is None:
        return 0
    if not ranks.expert_parallel:
        return experts.num
    start, stop = split_evenly(experts.num, 1, rank, ranks.num)
    return stop - start


def share_of(group: TensorGroup, description: ModelDescription, ranks: Ranks, rank: int) -> Share:
    """What `rank` keeps of a group. Raises `UsageError` for a number of ranks that the model cannot have."""
    kind = kind_of(group.name)
    num = group.num
    if kind == EXPERTS and ranks.expert_parallel and description.experts is not None:
        num = num * experts_of(description, ranks, rank) // description.experts.num
        return Share(num, 1, group.nbytes)
    found = _split(group, kind, description, ranks, rank) if ranks.num > 1 else None
    if found is None:
        return Share(num, 1, group.nbytes)
    axis, bounds = found
    if axis == 0:
        return Share(num, 1, math.ceil(group.nbytes * bounds.part))
    row_bytes = Fraction(group.nbytes, group.shape[0])
    return Share(num, group.shape[0], math.ceil(row_bytes * bounds.part))


def _split(
    group: TensorGroup, kind: str, description: ModelDescription, ranks: Ranks, rank: int
) -> tuple[int, Bounds] | None:
    """The dimension along which a tensor is split, and a rank's part of it; None for one that is not."""
    *_, module, suffix = ("", *group.name.split("."))
    axis = 1 if module == "o_proj" or module in _INNER_COLUMNS else 0
    if suffix in _TRANSPOSED:
        axis = 1 - axis
    if suffix in _NEVER_SPLIT or axis >= len(group.shape) or group.shape[axis] == 1:
        return None
    bounds = _bounds(module, kind, description, ranks, rank)
    return None if bounds is None else (axis, bounds)


def _bounds(module: str, kind: str, description: ModelDescription, ranks: Ranks, rank: int) -> Bounds | None:
    if module in _HEAD_ROWS or module == "o_proj":
        return _heads(description, ranks, rank)
    if module in _KV_ROWS:
        return _kv_heads(description, ranks, rank)
    if module in _INNER_ROWS or module in _INNER_COLUMNS:
        inner = _inner_size(kind, description)
        unit = BLOCK_VALUES if inner % BLOCK_VALUES == 0 else 1
        return Bounds(*split_evenly(inner, unit, rank, ranks.num), inner)
    if kind == HEAD or (kind == EMBEDDING and ranks.splits_embedding):
        return Bounds(*split_evenly(description.vocab_size, 1, rank, ranks.num), description.vocab_size)
    return None


def _heads(description: ModelDescription, ranks: Ranks, rank: int) -> Bounds:
    """Query heads go where their key-value heads are."""
    num = description.num_heads
    if description.latent is not None or replicates_kv(description, ranks):
        return Bounds(*split_evenly(num, 1, rank, ranks.num), num)
    group = num // description.num_kv_heads
    kv = _kv_heads(description, ranks, rank)
    return Bounds(kv.start * group, kv.stop * group, num)


def _kv_heads(description: ModelDescription, ranks: Ranks, rank: int) -> Bounds:
    num = description.num_kv_heads
    if replicates_kv(description, ranks):
        head = rank * num // ranks.num
        return Bounds(head, head + 1, num)
    return Bounds(*split_evenly(num, 1, rank, ranks.num), num)


def _inner_size(kind: str, description: ModelDescription) -> int:
    experts = description.experts
    if experts is None or kind == DENSE:
        return description.intermediate_size
    return experts.inner_size if kind == EXPERTS else experts.shared_size
