"""The contract of every operator, and of the backends that bring them.

Models and the engine call a `Backend` and nothing else; it is picked once at start, with a recorded reason.
`ops.reference` is the meaning of correct: a fast backend is compared with it over a table of shapes.
Row invariance: where `Backend.row_invariant` is true, the bits of a row do not depend on how many rows there
are or on which batch it came in.

Shapes: T tokens in the step, S sequences, P pages of the longest sequence, H hidden, N query heads, K KV
heads, D head size, R values of a row of the pool (see `kv_rows`), O outputs and I inputs of a linear, W
places of a tree's longest branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from firstlight.facts.description import Experts, LatentAttention
from firstlight.ops.groups import ExpertLayerOp, GroupedLinearOp, HeadsOp
from firstlight.ops.matrix import Matrix


class LinearOp(Protocol):
    """y = x W^T for one resident weight. Takes any float dtype, returns the layout's own."""

    layout: str  # names the layout in the start-up report
    num_bytes: int  # resident

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor: ...

    def rows(self, indices_T: torch.Tensor) -> torch.Tensor | None:
        """Rows of the weight in float32 [T, I], for a tied embedding; None where the layout is packed."""


# Roles of matrices beside "layer" and "head"; see the methods of `Backend` that take them.
ROUTER, GROUPED, HEADS = "router", "group", "heads"


@dataclass(frozen=True)
class MatrixKind:
    """What the choice of a layout depends on: role (see `Backend.linear`), format and shape [O, I]."""

    role: str
    format: str
    shape: tuple[int, int]


@dataclass(frozen=True)
class StepRows:
    """Which rows a step attends from and to. Host arrays, so that a backend can lay out its work.

    Row t is the token at `positions_T[t]` of sequence `sequence_T[t]` (an index into `page_table_SP`), and
    its KV goes to slot `write_slots_T[t]` of the pool; a slot is page * page_size + place within the page. A
    position's place in the pages is the position itself, but for nodes of a tree of drafts: see
    `branches_TW`.
    """

    positions_T: np.ndarray[Any, np.dtype[np.int64]]
    sequence_T: np.ndarray[Any, np.dtype[np.int64]]
    write_slots_T: np.ndarray[Any, np.dtype[np.int64]]
    page_table_SP: np.ndarray[Any, np.dtype[np.int64]]
    starts: Sequence[int]  # S: position of the first row of each sequence
    counts: Sequence[int]  # S: its number of rows
    page_size: int
    # Where rows of a tree find the positions from their sequence's start on, up to themselves: places in its
    # pages, then -1. A row of no tree has nothing but -1. None: there is no tree in the step.
    branches_TW: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def places(
        self,
        rows_M: np.ndarray[Any, Any],
        positions_ML: np.ndarray[Any, Any],
    ) -> np.ndarray[Any, Any]:
        """The places in the pages of positions that these rows see."""
        if self.branches_TW is None:
            return positions_ML
        branches = self.branches_TW[rows_M]
        own = positions_ML - np.asarray(self.starts)[self.sequence_T[rows_M]][:, None]
        within = np.clip(own, 0, branches.shape[1] - 1)
        is_own = (own >= 0) & (branches[:, :1] >= 0)
        return np.where(is_own, np.take_along_axis(branches, within, 1), positions_ML)


@dataclass(frozen=True)
class AttentionShape:
    """What is the same for every layer of a model. `window` is None or the sliding window in tokens.

    `full`: the shape of those layers that see everything, where a model mixes them with windowed ones.

    Latent attention: a value is the first `value_size` of its key, and the pool has no tensors of values.
    `expanded` is then its plain form, with a key and a value for each head.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    score_scale: float | None = None  # None: head_size ** -0.5
    value_size: int | None = None  # None: head_size
    expanded: AttentionShape | None = None
    full: AttentionShape | None = None

    @property
    def is_latent(self) -> bool:
        return self.expanded is not None

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_size**-0.5 if self.score_scale is None else self.score_scale

    @property
    def out_size(self) -> int:
        """Values that attention gives for each head."""
        return self.head_size if self.value_size is None else self.value_size


class Backend(Protocol):
    """The operators of one device. Methods of a layer run inside `torch.inference_mode`."""

    name: str
    reason: str  # why this one was picked
    row_invariant: bool
    device: torch.device
    key_dtype: torch.dtype  # of the pool; int8: see `kv_rows`
    value_dtype: torch.dtype
    hands_out_rows: bool  # whether every layout of a head can serve as the embedding too
    groups_take_order: bool  # whether weights of groups and of heads may have a `Matrix.order`

    def prepare(self, kinds: Sequence[MatrixKind], *, two_copies: bool) -> None:
        """Chooses layouts for these kinds. `two_copies`: memory suffices for two layouts of a weight."""

    def resident_bytes(self, kind: MatrixKind) -> int:
        """What a matrix of this kind will take in its layouts; call after `prepare`."""

    def loading_bytes(self, kind: MatrixKind) -> int:
        """What laying out a matrix of this kind takes beside its layouts, for the time of it."""

    def attention_bytes(self, shape: AttentionShape, num_tokens: int, max_position: int) -> int:
        """What attention takes in a step of so many tokens, beside its inputs and outputs."""

    def layout_notes(self) -> list[str]:
        """For the start-up report: each kind's layout, why, and its largest weight error."""

    def linear(self, weight: Matrix, *, role: str) -> LinearOp:
        """Lays out a weight.

        `role` is "layer", "head" (the output head, whose result is float32), or "router" (the scores of
        experts, whose inputs, sums and result are float32).
        """

    def grouped_linear(self, num_groups: int) -> GroupedLinearOp:
        """Room for the weights of that many groups; their kinds have the role "group"."""

    def expert_layer(
        self, rule: Experts, own: range, gate_up: GroupedLinearOp, down: GroupedLinearOp
    ) -> ExpertLayerOp:
        """Experts over products that this backend made; `own`: those that this rank has something of."""

    def heads_linear(self, weights: Sequence[Matrix]) -> HeadsOp:
        """Lays out a weight for each head; their kinds have the role "heads"."""

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """Float32 [.., H] normalised over the last dimension."""

    def rotate(self, x_TND: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of pairs (2i, 2i+1) by `turn_TD`: (cos, sin) of each, float32 [T, D/2, 2]."""

    def gated_silu(self, gate_up_TO: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * O]."""

    def plan_attention(self, rows: StepRows, shape: AttentionShape) -> Any:
        """Lays out a step's attention once; the result is passed to `attend` in every layer."""

    def attend(
        self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """Causal attention of each row over its sequence, itself included: float32 [T, N, `shape.out_size`].

        `keys` and `values` are the layer's pool [slots, K, R], in which the rows' own KV is already written;
        with latent attention they are the same tensor.
        """


Collective = Callable[[torch.Tensor], torch.Tensor]
Norms = tuple[torch.Tensor | None, ...]  # weights for q and for k


@dataclass(frozen=True)
class LatentRows:
    """What products gave: queries [.., N * (U + R)], and latents with their rotary keys [.., L + R].

    `keys` and `values` make keys and values of heads out of latents.
    """

    queries: torch.Tensor
    latents: torch.Tensor
    sizes: LatentAttention
    keys: HeadsOp
    values: HeadsOp


class Tape(Protocol):
    """Takes down the operators of a forward pass once, so that a backend can replay them without Python.

    A model's layers record themselves in the order in which they run. What an operator gives is handed on as
    an opaque value. `weights`: operators that `Backend.linear` made, side by side over one input.
    """

    def enter(self, layer: int) -> None:
        """What follows belongs to this layer: the black box will say so."""

    def embed(self, weight: Any, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sets the residual stream: from the rows of `weight`, or else by `look_up` before each replay."""

    def capture(self, place: int) -> None:
        """Keeps the residual stream as it is here: the captured state of this place."""

    def norm(self, weight_H: torch.Tensor, eps: float, *, of_logit_rows: bool = False) -> Any:
        """RMS norm of the residual stream, or of the rows whose logits are wanted."""

    def product(self, weights: Sequence[Any], x: Any, bias: torch.Tensor | None, name: str) -> torch.Tensor:
        """x W^T + b into a buffer [.., O] that every layer shares under this name."""

    def add_product(
        self, weights: Sequence[Any], x: Any, bias: torch.Tensor | None, reduce: Collective | None
    ) -> None:
        """Adds x W^T + b to the residual stream; `reduce` sums x W^T over several ranks."""

    def add_called(self, layer: Callable[[torch.Tensor, Any], torch.Tensor], x: Any) -> None:
        """Adds `layer(x, batch)` to the residual stream: it is called between two programs.

        For layers that no program has, or whose operators depend on values. `batch`: the step's.
        """

    def logits(self, weights: Sequence[Any], x: Any, gather: Collective | None) -> None:
        """The output head; `gather` joins the ranks' shares, where there are several."""

    def gated_silu(self, gate_up: torch.Tensor, name: str = "inner") -> Any:
        """See `Backend.gated_silu`."""

    def norm_of(self, x: torch.Tensor, weight_H: torch.Tensor, eps: float, name: str) -> Any:
        """RMS norm of a part of what a `product` gave."""

    def attend_latents(self, rows: LatentRows, layer: int, norm: tuple[torch.Tensor, float]) -> Any:
        """Norms and turns latents and writes them to the pool, attends, and expands; see `LatentRows`."""

    def experts(
        self,
        layer: ExpertLayerOp,
        scores: torch.Tensor,
        bias_E: torch.Tensor | None,
        x: Any,
    ) -> torch.Tensor:
        """What the experts of a layer give, as a share that goes on to `add_to_share` and `add_share`."""

    def add_to_share(self, share: torch.Tensor, weights: Sequence[Any], x: Any) -> None:
        """Adds x W^T to a share."""

    def add_share(self, share: torch.Tensor, reduce: Collective | None) -> None:
        """Adds a share to the residual stream; `reduce` sums it over several ranks."""

    def attend(self, qkv: torch.Tensor, layer: int, norms: Norms, eps: float, *, windowed: bool) -> Any:
        """Norms (if any) and turns q and k, writes k and v to the pool, attends, to all or `windowed`."""
