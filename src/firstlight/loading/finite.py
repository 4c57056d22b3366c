"""Weights that are not numbers: looked for once, when a model's logits were none.

Every tensor is read once more, in slices of whole heads, and its values are made as the model's layers see
them. Invariant: memory holds one slice at a time, and what is found is named with its tensor and file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, TensorFacts
from firstlight.facts.checkpoint.names import is_ignorable
from firstlight.facts.checkpoint.remedies import DOWNLOAD_AGAIN
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.quant.registry import dequantize
from firstlight.quant.weight import Weight

SLICE_VALUES = 16 * 1024 * 1024  # 64 MB as float32
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class NotFinite:
    """A tensor with values that are no numbers."""

    name: str
    path: str
    num_values: int
    num_nan: int
    num_infinite: int

    def __str__(self) -> str:
        kinds = [(self.num_nan, "NaN"), (self.num_infinite, "infinite")]
        found = " and ".join(f"{num} {kind}" for num, kind in kinds if num)
        return f"{self.path}: the tensor {self.name} holds {found} among its {self.num_values} values"


def find_not_finite(checkpoint: Checkpoint, progress: Progress | None = None) -> list[NotFinite]:
    """All tensors of the model that hold NaN or infinity; `progress(done, total)` counts tensors.

    Raises `ModelFileError` where a file cannot be read.
    """
    tied = checkpoint.description.tie_embeddings
    served = [facts for name, facts in checkpoint.tensors.items() if not is_ignorable(name, tied)]
    found = []
    for done, facts in enumerate(served):
        if progress is not None:
            progress(done, len(served))
        num_nan, num_infinite = _count(checkpoint, facts)
        if num_nan or num_infinite:
            num_values = torch.Size(facts.shape).numel()
            found.append(NotFinite(facts.name, facts.path, num_values, num_nan, num_infinite))
    return found


def bad_weights(found: list[NotFinite]) -> ModelFileError:
    """The error about weights that are not numbers, of which there is one at least."""
    others = f", and {len(found) - 1} other tensors are alike" if len(found) > 1 else ""
    return ModelFileError(
        f"{found[0]}{others}: the file is damaged, or was saved by a training that had failed.",
        DOWNLOAD_AGAIN,
    )


def _count(checkpoint: Checkpoint, facts: TensorFacts) -> tuple[int, int]:
    counts = [0, 0]

    def take(wanted: Wanted, weight: Weight) -> None:
        values = dequantize(weight)
        if not bool(values.isfinite().all()):
            counts[0] += int(values.isnan().sum())
            counts[1] += int(values.isinf().sum())

    alone = replace(checkpoint, tensors={facts.name: facts})
    for wanted in _slices(facts, checkpoint.description.head_size):
        read_tensors(alone, [wanted], take)
    return counts[0], counts[1]


def _slices(facts: TensorFacts, head_size: int) -> list[Wanted]:
    """Some rows each; a vector is one."""
    if len(facts.shape) == 1:
        return [Wanted.whole(facts.name, facts.shape)]
    num_rows, num_columns = facts.shape
    each = max(1, SLICE_VALUES // num_columns // head_size) * head_size
    return [
        Wanted.row_slice(facts.name, facts.shape, start, min(start + each, num_rows))
        for start in range(0, num_rows, each)
    ]
