"""What a forward pass runs on: the tensors of one step, passed as an argument to every layer.

There is no global context beside it.

Shapes: T tokens in the step, D head size, L logit rows, K KV heads, C captured layers, H hidden, R values of
a row of the pool (see `ops.kv_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OwnRows:
    """For a step whose rows attend to rows of the step alone: the backend's plan over them.

    Row t lies in slot t + 1; slot 0 is zero.
    """

    attention: Any


@dataclass(frozen=True)
class ForwardBatch:
    """`attention` is the backend's plan; `keys[l]` and `values[l]` are the pool of layer l, [slots, K, R].

    `full_attention`: that of layers which see everything, where a model mixes them with windowed ones.

    With latent attention they are the same tensor; then `own` is there for prompts that may be expanded.
    """

    tokens_T: torch.Tensor  # int64
    turn_TD: torch.Tensor  # float32 [T, D/2, 2]: cos and sin of each rotary pair
    write_slots_T: torch.Tensor  # int64: where each token's KV goes
    logit_rows_L: torch.Tensor  # int64: rows whose logits are wanted
    attention: Any
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    full_attention: Any = None
    states_TCH: torch.Tensor | None = None  # float32: where the captured states of a step go
    own: OwnRows | None = None
