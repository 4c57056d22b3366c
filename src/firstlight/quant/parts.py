"""The parts of one slice of a quantised matrix, with the arithmetic of which element stands for what.

A part may begin before the slice and end behind it, where one element stands for several rows or columns.
Invariant: `codes` and `grid` give exactly the slice.

Shapes: N rows and K columns of the slice, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN
from firstlight.facts.checkpoint.schemes import Scheme
from firstlight.facts.checkpoint.tensor_facts import StoredPart, TensorFacts

TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class Window:
    """A slice of a matrix: half-open bounds."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Parts:
    """See the module. `raw`: by role, uint8 [stored rows, bytes]."""

    facts: TensorFacts
    window: Window
    raw: Mapping[str, torch.Tensor]

    @property
    def scheme(self) -> Scheme:
        assert self.facts.scheme is not None, "a tensor of parts has a scheme"
        return self.facts.scheme

    def values(self, role: str) -> torch.Tensor:
        """The elements that were read, in their own type, rows of the matrix first."""
        part = self._part(role)
        values = self.raw[role].view(TYPES[part.dtype])
        return values.t() if part.is_transposed else values

    def has(self, role: str) -> bool:
        """Whether there is such a part."""
        return role in self.raw

    def grid(self, role: str, step: int) -> torch.Tensor:
        """The element that stands for each row and for every `step`-th column [N, K / step]."""
        part = self._part(role)
        rows = _index(self.window.rows, part.rows_each, 1)
        columns = _index(self.window.columns, part.columns_each, step)
        return self.values(role).index_select(0, rows).index_select(1, columns)

    def spread(self, values: torch.Tensor, role: str, step: int) -> torch.Tensor:
        """The same of values that were unpacked from a part's words of 8 rows: each stands for one row."""
        part = self._part(role)
        first = self.window.rows[0] % part.rows_each
        columns = _index(self.window.columns, part.columns_each, step)
        return values[first : first + self.window.shape[0]].index_select(1, columns)

    def block_grid(self, role: str) -> torch.Tensor:
        """One element a block, as float32 [N, B]."""
        return self.grid(role, SUPPORTED[self.facts.format].block_values).float()

    def cut(self, values: torch.Tensor, role: str) -> torch.Tensor:
        """Of values that each stand for one row and column, made of all elements of `role`, the slice."""
        part = self._part(role)
        first_row, first_column = (
            bounds[0] % each
            for bounds, each in (
                (self.window.rows, part.rows_each),
                (self.window.columns, part.columns_each),
            )
        )
        rows, columns = self.window.shape
        return values[first_row : first_row + rows, first_column : first_column + columns]

    def order(self) -> torch.Tensor | None:
        """The columns sorted by their groups, int64 [K]; None where they lie so.

        Raises `UnsupportedError` for some columns of a matrix, whose groups cannot be whole.
        """
        if not self.has("order"):
            return None
        groups = self.grid("order", 1)[0].to(torch.int64)
        size = self.scheme.group_size or self.facts.shape[1]
        first, last = self.window.columns
        if torch.equal(groups, torch.arange(first, last) // size):
            return None
        module = self.facts.name.removesuffix(".weight")
        if (first, last) != (0, self.facts.shape[1]):
            raise UnsupportedError(
                f"the weight of {module} is stored as {self.scheme.words} with columns in another order than "
                "their groups, so that ranks cannot share them.",
                "Use --tensor-parallel 1, or a file made without desc_act.",
            )
        sizes = groups.clamp(-1, last // size).add(1).bincount(minlength=last // size + 1)
        if sizes.tolist() != [0] + [size] * (last // size):
            raise ModelFileError(
                f"{self.facts.path}: the groups of the weight of {module} do not have {size} columns each.",
                DOWNLOAD_AGAIN,
            )
        return groups.argsort(stable=True)

    def _part(self, role: str) -> StoredPart:
        return next(part for part in self.facts.parts if part.role == role)


def _index(bounds: tuple[int, int], each: int, step: int) -> torch.Tensor:
    return torch.arange(*bounds, step) // each - bounds[0] // each


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes of each word of a row, the lowest bits first: uint8 [rows, codes]."""
    packed = words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def in_order(codes: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Columns of codes as they come in the blocks: a group's together."""
    order = parts.order()
    return codes if order is None else codes[:, order]
