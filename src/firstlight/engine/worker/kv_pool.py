"""The KV pool: the tensors behind the pages.

Invariant: the null page (slots 0 .. page_size - 1) stays zero, because padded attention columns read slot 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstlight.ops.contract import AttentionShape, Backend
from firstlight.ops.kv_rows import row_bytes, row_values


def token_row_bytes(shape: AttentionShape, ops: Backend) -> tuple[int, ...]:
    """What a token takes in one layer, for each KV head: its key and its value, or its latent."""
    key_bytes = row_bytes(shape.head_size, ops.key_dtype)
    return (key_bytes,) if shape.is_latent else (key_bytes, row_bytes(shape.head_size, ops.value_dtype))


class KVPool:
    """Keys and values of every layer, [slots, K, R] each; slot = page * page_size + position in the page.

    R, the values of a row, is as `ops.kv_rows` says. Of latent attention `values` are the same tensors as
    `keys`: a row is the latent, which is the value, and the rotary key behind it.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        shape: AttentionShape,
        ops: Backend,
    ) -> None:
        def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
            rows = (num_slots, shape.num_kv_heads, row_values(shape.head_size, dtype))
            return [torch.empty(rows, dtype=dtype, device=ops.device) for _ in range(num_layers)]

        self.keys = tensors(ops.key_dtype)
        self.values = self.keys if shape.is_latent else tensors(ops.value_dtype)
        # Each once: rows that moved twice would be those of others.
        self._tensors = self.keys if shape.is_latent else [*self.keys, *self.values]
        self.token_bytes = num_layers * shape.num_kv_heads * sum(token_row_bytes(shape, ops))

    def move(self, from_slots: Sequence[int], to_slots: Sequence[int]) -> None:
        """Copies rows of every layer, as if all at once."""
        device = self.keys[0].device
        source, target = (torch.tensor(slots, device=device) for slots in (from_slots, to_slots))
        for tensor in self._tensors:
            tensor[target] = tensor[source]

    def zero_null_page(self, page_size: int) -> None:
        """Run once before the first step. The other pages are written before they are read."""
        for tensor in self._tensors:
            tensor[:page_size].zero_()
