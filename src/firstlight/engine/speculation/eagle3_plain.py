"""The drafter's layer in plain PyTorch: the reference, and what devices without kernels of ours run.

See `eagle3_layer.Layer`. Invariant: the numbers are those of `models.eagle3` in float32, which training uses
too.

Shapes: T rows of a step, B sequences, L slots of the longest one, N heads, K key-value heads, D head size,
C captured states, H hidden, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
import torch.nn.functional as F

from firstlight.engine.speculation.deferred_kv_writes import TrueRows
from firstlight.engine.speculation.eagle3_layer import DraftRows
from firstlight.models.eagle3 import Eagle3Drafter


class PlainLayer:
    """See the module. `num_slots`: with those for drafts."""

    def __init__(self, model: Eagle3Drafter, num_slots: int, device: torch.device) -> None:
        config = model.config
        self._model = model.to(device)
        self._device = device
        num_kv_heads, key_size, value_size = model.kv_shape
        self.keys = torch.zeros(num_slots, num_kv_heads, key_size, device=device)
        # A latent is both: the values are its beginning.
        is_latent = config.latent is not None
        self.values = self.keys[..., :value_size] if is_latent else torch.zeros_like(self.keys)
        self.states = torch.zeros(num_slots, config.hidden_size, device=device)
        self._hidden_BH = self.states[:0]

    def write(self, states_TCH: torch.Tensor, rows: TrueRows) -> None:
        """See `Layer`."""
        slots = self._there(rows.slots)
        self.states[slots] = self._model.fuse(states_TCH)
        before_TH = self.states[self._there(rows.before)]
        new = self._model.attending(before_TH, self._there(rows.tokens), self._there(rows.positions))
        self.keys[slots], self.values[slots] = new.keys, new.values

    def begin(self, before_B: np.ndarray) -> None:
        """See `Layer`."""
        self._hidden_BH = self.states[self._there(before_B)]

    def draft(self, rows: DraftRows) -> tuple[np.ndarray, torch.Tensor]:
        """See `Layer`."""
        positions_B = self._there(rows.positions)
        new = self._model.attending(self._hidden_BH, self._there(rows.tokens), positions_B)
        slots = self._there(rows.slots)
        self.keys[slots], self.values[slots] = new.keys, new.values
        longest = int(rows.positions.max()) + 1
        table_BL = self._there(rows.table[:, :longest])
        seen_BL = torch.arange(longest, device=self._device) <= positions_B[:, None]
        attended_BND = F.scaled_dot_product_attention(
            new.queries[:, :, None],
            self.keys[table_BL].transpose(1, 2),
            self.values[table_BL].transpose(1, 2),
            attn_mask=seen_BL[:, None, None],
            enable_gqa=True,
        )
        output_BH = self._model.finish(attended_BND.flatten(1), new.residual)
        logits_BR = self._model.logits(output_BH)
        self._hidden_BH = self._model.feedback(output_BH)
        best: np.ndarray = logits_BR.argmax(-1).cpu().numpy()
        return best, logits_BR

    def follow(self, rows: np.ndarray) -> None:
        """See `Layer`."""
        self._hidden_BH = self._hidden_BH[self._there(rows)]

    def moved(self, from_slots: Rows[int], to_slots: Rows[int]) -> None:
        """See `Layer`."""
        is_latent = self._model.config.latent is not None
        for tensor in (self.states, self.keys) if is_latent else (self.states, self.keys, self.values):
            tensor[list(to_slots)] = tensor[list(from_slots)]

    def _there(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
