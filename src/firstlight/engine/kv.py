"""The KV pool: the tensors behind the pages. Made by `engine.startup`, written by the models' attention.

Invariant: the null page (slots 0 .. page_size - 1) stays zero, because padded attention columns read slot 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.ops.contract import Backend
from firstlight.ops.kv_rows import row_values


class KVPool:
    """Keys and values of every layer, [slots, K, R] each; slot = page * page_size + position in the page.

    `row_shape` is (K, D); R, the values of a row, is as `ops.kv_rows` says.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        row_shape: tuple[int, int],
        ops: Backend,
    ) -> None:
        def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
            num_kv_heads, head_size = row_shape
            shape = (num_slots, num_kv_heads, row_values(head_size, dtype))
            return [torch.empty(shape, dtype=dtype, device=ops.device) for _ in range(num_layers)]

        self.keys = tensors(ops.key_dtype)
        self.values = tensors(ops.value_dtype)

    def move(self, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Copies rows of every layer, as if all at once."""
        device = self.keys[0].device
        source, target = (torch.tensor(slots, device=device) for slots in (from_slots, to_slots))
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def zero_null_page(self, page_size: int) -> None:
        """Run once before the first step. The other pages are written before they are read."""
        for tensor in (*self.keys, *self.values):
            tensor[:page_size].zero_()
