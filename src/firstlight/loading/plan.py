"""What a rank wants to read, and whether the checkpoint can give it: checked before the first byte is read.

Models state their parameters as `Wanted`; `reader` reads them. Invariant: a `Segment` asks only for bytes
inside its tensor, in whole rows and whole blocks, and keeps whole heads of rope-permuted tensors together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from firstlight.base.errors import ModelFileError, UsageError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, TensorFacts
from firstlight.facts.checkpoint.formats import SUPPORTED
from firstlight.facts.checkpoint.names import is_ignorable
from firstlight.facts.checkpoint.tensor_facts import StoredPart
from firstlight.facts.planning.sharding import split_evenly as split_evenly  # for the models, with `Wanted`

MAX_SUGGESTED_RANKS = 16


@dataclass(frozen=True)
class Wanted:
    """A slice of one tensor. `shape` is the whole tensor's, (N, K) or (N,), in Hugging Face order.

    `rows` and `columns` are half-open. Of a vector, `rows` are its values and `columns` is (0, 1).
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Wanted:
        """All of a tensor."""
        return cls(name, shape, (0, shape[0]), (0, shape[1] if len(shape) > 1 else 1))

    @classmethod
    def row_slice(cls, name: str, shape: tuple[int, ...], start: int, stop: int) -> Wanted:
        """Some rows, or some values of a vector."""
        return cls(name, shape, (start, stop), (0, shape[1] if len(shape) > 1 else 1))

    @classmethod
    def column_slice(cls, name: str, shape: tuple[int, ...], start: int, stop: int) -> Wanted:
        """Some columns of every row; whole blocks."""
        return cls(name, shape, (0, shape[0]), (start, stop))

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of the `Weight` that will be delivered."""
        rows = self.rows[1] - self.rows[0]
        return (rows,) if len(self.shape) == 1 else (rows, self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Segment:
    """The bytes of one `Wanted`: `nbytes` neighbouring bytes of a file, whole rows of the tensor.

    From each row of `row_bytes` the slice keeps `kept_bytes` from `skipped_bytes` on. `part`: of a matrix
    that is stored in several tensors, which has a segment for each.
    """

    wanted: Wanted
    facts: TensorFacts
    offset: int
    nbytes: int
    num_rows: int
    row_bytes: int
    skipped_bytes: int
    kept_bytes: int
    part: StoredPart | None = None

    @property
    def path(self) -> str:
        """The file."""
        return self.part.path if self.part is not None else self.facts.path

    @property
    def end(self) -> int:
        """Where the bytes end in the file."""
        return self.offset + self.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that are kept of what is read."""
        return self.num_rows * self.kept_bytes


@dataclass(frozen=True)
class ReadPlan:
    """Segments in file order, and what the file holds beside them."""

    segments: tuple[Segment, ...]
    unused: tuple[str, ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes that all deliveries hold together."""
        return sum(segment.resident_bytes for segment in self.segments)


def make_plan(
    checkpoint: Checkpoint, wanted: Sequence[Wanted], others: Collection[str] = frozenset()
) -> ReadPlan:
    """Checks every `Wanted` against the checkpoint and orders the reads. `others`: what other ranks read.

    Raises `ModelFileError` for a missing tensor, another shape, or tensors nobody asked for; `UsageError` for
    a slice that cuts through a block or a head.
    """
    names = {item.name for item in wanted}
    if len(names) != len(wanted):
        twice = next(item.name for item in wanted if sum(other.name == item.name for other in wanted) > 1)
        raise ValueError(f"the tensor {twice} is wanted twice")
    segments = [segment for item in wanted for segment in _segments(checkpoint, item)]
    segments.sort(key=lambda segment: (segment.path, segment.offset))
    unused = sorted(checkpoint.tensors.keys() - names - set(others))
    foreign = [name for name in unused if not is_ignorable(name, checkpoint.description.tie_embeddings)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise ModelFileError(
            f"{checkpoint.path}: {len(foreign)} tensors do not belong to a "
            f"{checkpoint.description.architecture} model of this configuration: {shown}.",
            "Check that the configuration belongs to these weights.",
        )
    return ReadPlan(tuple(segments), tuple(unused))


def _segments(checkpoint: Checkpoint, wanted: Wanted) -> list[Segment]:
    facts = checkpoint.tensors.get(wanted.name)
    if facts is None:
        raise ModelFileError(
            f"{checkpoint.path}: the tensor {wanted.name} is missing.", "Download the model again."
        )
    if facts.shape != wanted.shape:
        raise ModelFileError(
            f"{facts.path}: the tensor {wanted.name} has the shape {list(facts.shape)}; the configuration "
            f"demands {list(wanted.shape)}.",
            "Check that the configuration belongs to these weights.",
        )
    _require_range(wanted, wanted.rows, wanted.shape[0], "rows")
    if facts.rope_permuted:
        _require_heads(wanted, checkpoint.description.head_size)
    if len(wanted.shape) == 1:
        return [_vector_segment(facts, wanted)]
    _require_range(wanted, wanted.columns, wanted.shape[1], "columns")
    geometry = SUPPORTED[facts.format]
    if any(bound % geometry.block_values for bound in wanted.columns):
        raise _cut_block(facts, wanted, geometry.block_values)
    if facts.parts:
        return [_part_segment(facts, part, wanted) for part in facts.parts]
    row_bytes = geometry.row_bytes(wanted.shape[1])
    num_rows = wanted.rows[1] - wanted.rows[0]
    whole = Segment(
        wanted=wanted,
        facts=facts,
        offset=facts.offset + wanted.rows[0] * row_bytes,
        nbytes=num_rows * row_bytes,
        num_rows=num_rows,
        row_bytes=row_bytes,
        skipped_bytes=geometry.row_bytes(wanted.columns[0]),
        kept_bytes=geometry.row_bytes(wanted.columns[1] - wanted.columns[0]),
    )
    return [whole]


def _part_segment(facts: TensorFacts, part: StoredPart, wanted: Wanted) -> Segment:
    """The stored elements that stand for any of the wanted rows and columns."""
    rows = _covering(wanted.rows, part.rows_each)
    columns = _covering(wanted.columns, part.columns_each)
    if part.is_transposed:
        rows, columns = columns, rows
    item_bytes = part.nbytes // (part.shape[0] * part.shape[1])
    row_bytes, num_rows = part.shape[1] * item_bytes, rows[1] - rows[0]
    return Segment(
        wanted=wanted,
        facts=facts,
        offset=part.offset + rows[0] * row_bytes,
        nbytes=num_rows * row_bytes,
        num_rows=num_rows,
        row_bytes=row_bytes,
        skipped_bytes=columns[0] * item_bytes,
        kept_bytes=(columns[1] - columns[0]) * item_bytes,
        part=part,
    )


def _covering(bounds: tuple[int, int], each: int) -> tuple[int, int]:
    return bounds[0] // each, -(-bounds[1] // each)


def _vector_segment(facts: TensorFacts, wanted: Wanted) -> Segment:
    geometry = SUPPORTED[facts.format]
    start, stop = wanted.rows
    if start % geometry.block_values or stop % geometry.block_values:
        raise _cut_block(facts, wanted, geometry.block_values)
    nbytes = geometry.row_bytes(stop - start)
    return Segment(wanted, facts, facts.offset + geometry.row_bytes(start), nbytes, 1, nbytes, 0, nbytes)


def _require_range(wanted: Wanted, bounds: tuple[int, int], size: int, what: str) -> None:
    start, stop = bounds
    if not 0 <= start < stop <= size:
        raise ValueError(f"{what} {start}..{stop} of {wanted.name} with {size}")


def _require_heads(wanted: Wanted, head_size: int) -> None:
    if wanted.rows[0] % head_size or wanted.rows[1] % head_size:
        raise UsageError(
            f"Rows {wanted.rows[0]}..{wanted.rows[1]} of {wanted.name} cut through an attention head of "
            f"{head_size} rows.",
            f"Use --tensor-parallel {wanted.shape[0] // head_size} or less.",
        )


def _cut_block(facts: TensorFacts, wanted: Wanted, block_values: int) -> UsageError:
    bounds = wanted.rows if len(wanted.shape) == 1 else wanted.columns
    size = wanted.shape[-1]
    fitting = [n for n in range(1, MAX_SUGGESTED_RANKS + 1) if size % (n * block_values) == 0]
    return UsageError(
        f"{facts.path}: columns {bounds[0]}..{bounds[1]} of {wanted.name} cut through a {facts.format} "
        f"block of {block_values} values.",
        f"Sizes of --tensor-parallel that split its {size} columns evenly in whole blocks: "
        f"{', '.join(map(str, fitting))}."
        if fitting
        else "Use --tensor-parallel 1.",
    )
