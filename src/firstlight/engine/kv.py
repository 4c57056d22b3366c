"""The KV pool: the tensors behind the pages. Made by `engine.startup`, written by the models' attention.

Invariant: the null page (slots 0 .. page_size - 1) stays zero, because padded attention columns read slot 0.
"""

from __future__ import annotations

import torch


class KVPool:
    """Keys and values of every layer, [slots, K, D] each; slot = page * page_size + position in the page."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        row_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = [
            torch.empty(num_slots, *row_shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self.values = [
            torch.empty(num_slots, *row_shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    def zero_null_page(self, page_size: int) -> None:
        """Run once before the first step. The other pages are written before they are read."""
        for tensor in (*self.keys, *self.values):
            tensor[:page_size].zero_()
