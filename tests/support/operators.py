"""What operators are tested on: matrices of every format, and paged histories with naive attention over them.

Used by the tests of `ops`. The naive formulas are float64 torch without pages, batches or tricks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np
import torch

from firstlight.engine.speculation.tree import lay_out
from firstlight.models.layers.linear import StoredMatrix
from firstlight.ops.contract import AttentionShape, StepRows
from firstlight.quant.int4 import int4_blocks
from firstlight.quant.scaled import scaled_blocks
from firstlight.quant.weight import Weight
from support import nested
from support.quantised import four_bits, small_floats

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NESTED = ("Q4_K", "Q6_K")
SAFETENSORS = ("INT4", "INT4_ZERO", "INT8", "FP8", "FP4")
FORMATS = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", *NESTED, *SAFETENSORS)


def random_values(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def matrix(values_OI: torch.Tensor, weight_format: str) -> StoredMatrix:
    """A matrix as a checkpoint would hold it; blocks are made by the gguf package."""
    if weight_format in PLAIN:
        raw = values_OI.to(PLAIN[weight_format]).contiguous().view(torch.uint8)
    elif weight_format in NESTED:
        raw = torch.from_numpy(nested.quantize(values_OI.numpy(), weight_format))
    elif weight_format in SAFETENSORS:
        raw = _blocks(values_OI, weight_format)
    else:
        kind = gguf.GGMLQuantizationType[weight_format]
        raw = torch.from_numpy(gguf.quants.quantize(values_OI.numpy(), kind))
    return StoredMatrix(Weight(weight_format, tuple(values_OI.shape), raw))


def _blocks(values_OI: torch.Tensor, weight_format: str) -> torch.Tensor:
    """Blocks as they are put together out of safetensors; scales that float16 can hold."""
    if weight_format.startswith("INT4"):
        symmetric = weight_format == "INT4"
        codes, scales, zeros, _ = four_bits(values_OI, 32, symmetric=symmetric, dtype=torch.float16)
        return int4_blocks(codes.to(torch.uint8), scales, *([] if symmetric else [zeros.float()]))
    largest = {"INT8": 127.0, "FP8": 448.0, "FP4": 6.0}[weight_format]
    size = 16 if weight_format == "FP4" else 32
    scales = (values_OI.unflatten(1, (-1, size)).abs().amax(-1) / largest).half().float()
    each = scales.repeat_interleave(size, 1)
    if weight_format == "FP4":
        return scaled_blocks(small_floats(values_OI, each)[0], scales)
    if weight_format == "FP8":
        return scaled_blocks((values_OI / each).clamp(-448, 448).to(torch.float8_e4m3fn), scales)
    return scaled_blocks((values_OI / each).round().clamp(-127, 127).to(torch.int8), scales)


@dataclass(frozen=True)
class Paged:
    """Histories of some sequences in a pool; `keys` and `values` [slots, K, D]. Page 0 is zero.

    Of latent attention they are the same tensor.
    """

    shape: AttentionShape
    page_size: int
    tables_SP: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(
        cls, shape: AttentionShape, lengths: Sequence[int], page_size: int = 16, seed: int = 0
    ) -> Paged:
        """Pages in random order, so that nothing can be right by luck."""
        num_pages = [-(-length // page_size) for length in lengths]
        order = np.random.default_rng(seed).permutation(np.arange(1, sum(num_pages) + 3))
        tables = np.zeros((len(lengths), max(num_pages)), dtype=np.int64)
        taken = 0
        for row, num in enumerate(num_pages):
            tables[row, :num] = order[taken : taken + num]
            taken += num
        slots = (sum(num_pages) + 3) * page_size
        row_shape = (slots, shape.num_kv_heads, shape.head_size)
        keys, values = random_values(*row_shape, seed=seed + 1), random_values(*row_shape, seed=seed + 2)
        keys[:page_size] = values[:page_size] = 0.0
        values = keys if shape.is_latent else values
        return cls(shape, page_size, tables, keys, values)

    def rows(self, entries: Sequence[tuple[int, int, int]]) -> StepRows:
        """A step of (sequence, first position, number of rows)."""
        sequences = np.array([entry[0] for entry in entries])
        counts = np.array([entry[2] for entry in entries])
        sequence_T = np.repeat(np.arange(len(entries)), counts)
        positions_T = np.concatenate([np.arange(first, first + num) for _, first, num in entries])
        table = self.tables_SP[sequences]
        slots = (
            table[sequence_T, positions_T // self.page_size] * self.page_size + positions_T % self.page_size
        )
        return StepRows(
            positions_T=positions_T,
            sequence_T=sequence_T,
            write_slots_T=slots,
            page_table_SP=table,
            starts=[entry[1] for entry in entries],
            counts=[entry[2] for entry in entries],
            page_size=self.page_size,
        )

    def rows_with_trees(
        self, entries: Sequence[tuple[int, int, int]], parents: Mapping[int, Sequence[int]]
    ) -> StepRows:
        """The same, where some entries are trees: their first row, and a row for each of `parents`."""
        rows = self.rows(entries)
        firsts = np.cumsum(rows.counts) - rows.counts
        trees = [(entry, list(found)) for entry, found in parents.items()]
        positions_T = rows.positions_T.copy()
        branches_TW = lay_out(trees, np.array(rows.starts), firsts, positions_T)
        return replace(rows, positions_T=positions_T, branches_TW=branches_TW)

    def straightened(self, rows: StepRows, row: int) -> tuple[Paged, StepRows]:
        """A pool in which a node's branch lies in order, as after as many plain steps, and its row."""
        sequence, position = int(rows.sequence_T[row]), int(rows.positions_T[row])
        order = np.arange(position + 1)
        places = rows.places(np.array([row]), order[None])[0]
        table, size = rows.page_table_SP[sequence], self.page_size
        from_slots, to_slots = (table[at // size] * size + at % size for at in (places, order))
        keys, values = self.keys.clone(), self.values.clone()
        keys[to_slots], values[to_slots] = self.keys[from_slots], self.values[from_slots]
        other = replace(self, keys=keys, values=values, tables_SP=rows.page_table_SP)
        return other, other.rows([(sequence, position, 1)])

    def naive(self, q_ND: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
        """Attention of one row, float64 [N, D]."""
        first = 0 if self.shape.window is None else max(0, position + 1 - self.shape.window)
        seen = torch.arange(first, position + 1)
        pages = torch.from_numpy(self.tables_SP[sequence])[seen // self.page_size]
        slots = pages * self.page_size + seen % self.page_size
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys = self.keys[slots].double().repeat_interleave(group, 1)
        values = self.values[slots, :, : self.shape.out_size].double().repeat_interleave(group, 1)
        scores = torch.einsum("nd,lnd->nl", q_ND.double(), keys) * self.shape.scale
        return torch.einsum("nl,lnd->nd", scores.softmax(-1), values)
