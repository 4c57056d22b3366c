"""What a checkpoint holds: the description of its model and where each tensor's bytes lie.

Invariant: every tensor's byte range lies inside its file, and its size follows from format and shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from firstlight.facts.checkpoint.schemes import Scheme
from firstlight.facts.description import ModelDescription


@dataclass(frozen=True)
class StoredPart:
    """One of several stored tensors that make up a matrix: codes, scales, zeros, ... (`role`).

    `shape` is the file's, as rows and columns (a scalar is 1 x 1). One stored element stands for `rows_each`
    rows and `columns_each` columns of the matrix. `is_transposed`: the file's rows are the matrix's columns.
    """

    role: str
    dtype: str  # of safetensors
    shape: tuple[int, int]
    path: str
    offset: int
    nbytes: int
    rows_each: int = 1
    columns_each: int = 1
    is_transposed: bool = False


@dataclass(frozen=True)
class TensorFacts:
    """One tensor. `name` and `shape` are in Hugging Face terms: (rows, columns) or (n,), row-major.

    `rope_permuted`: the rows of each head are stored interleaved (GGUF's llama q and k); a reader restores
    the Hugging Face order. `parts`: of a matrix that is stored in several tensors by `scheme`; the reader
    puts them together, `path` and `offset` are those of the first, `nbytes` is their sum.
    """

    name: str
    format: str  # a key of facts.formats.SUPPORTED
    shape: tuple[int, ...]
    path: str
    offset: int  # from the start of the file
    nbytes: int
    rope_permuted: bool = False
    parts: tuple[StoredPart, ...] = ()
    scheme: Scheme | None = None

    @property
    def paths(self) -> set[str]:
        """The files that it lies in."""
        return {self.path, *(part.path for part in self.parts)}


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened and checked; no weight has been read yet.

    `notes` say what the files hold beside the model.
    """

    path: str
    kind: str  # "gguf" or "safetensors"
    description: ModelDescription
    tensors: dict[str, TensorFacts]
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def formats(self) -> dict[str, int]:
        """Bytes by weight format."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.format] = totals.get(tensor.format, 0) + tensor.nbytes
        return totals


def find_overlap(tensors: list[TensorFacts]) -> tuple[TensorFacts, TensorFacts] | None:
    """Two tensors of one file that claim the same bytes, if there are any."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.path, tensor.offset))
    for before, after in pairwise(ordered):
        if before.path == after.path and before.offset + before.nbytes > after.offset:
            return before, after
    return None
