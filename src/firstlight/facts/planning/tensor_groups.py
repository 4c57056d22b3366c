"""Tensors of a checkpoint in groups that differ in the numbers of their names alone, for planning.

A model with experts has hundreds of thousands of tensors, and planning asks the same of all that are alike.
Made from opened checkpoints, and from rows that describe headers. Invariant: the groups of a checkpoint hold
each of its tensors once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from firstlight.facts.checkpoint.safetensors_header import DTYPE_BITS

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class TensorGroup:
    """`num` tensors of one format and shape. `name` is a Hugging Face name with # for numbers.

    `nbytes` are those of one tensor.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    num: int

    @property
    def total_bytes(self) -> int:
        """Of all its tensors."""
        return self.num * self.nbytes


class HeaderRow(msgspec.Struct, frozen=True):
    """Entries of safetensors headers that differ in their names alone.

    In `name`, "{0-3}" stands for numbers and "{gate,up}" for words; each combination is a tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num(self) -> int:
        """How many tensors it stands for."""
        return math.prod(len(_choices(inside)) for inside in _BRACES.findall(self.name))

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def names(self) -> Iterator[str]:
        """Every tensor's name."""
        pieces = _BRACES.split(self.name)
        choices = [_choices(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        for combination in itertools.product(*choices):
            yield "".join(combination)


@dataclass(frozen=True)
class NamedTensor:
    """What grouping needs to know of a tensor."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


def group_tensors(tensors: Iterable[NamedTensor]) -> list[TensorGroup]:
    """Groups in the order of their first tensors."""
    numbers: dict[tuple[str, str, tuple[int, ...], int], int] = {}
    for tensor in tensors:
        key = (_NUMBER.sub("#", tensor.name), tensor.format, tensor.shape, tensor.nbytes)
        numbers[key] = numbers.get(key, 0) + 1
    return [TensorGroup(*key, num) for key, num in numbers.items()]


def group_rows(rows: Iterable[HeaderRow]) -> list[TensorGroup]:
    """The same for rows; words in braces are spelled out, numbers are not."""
    groups: list[TensorGroup] = []
    for row in rows:
        folded = _BRACES.sub(lambda match: "#" if match[1][:1].isdigit() else match[0], row.name)
        words = list(HeaderRow(folded, row.dtype, row.shape).names())
        groups += [
            TensorGroup(word, row.dtype, row.shape, row.nbytes, row.num // len(words)) for word in words
        ]
    return groups


def number_range(numbers: Sequence[int]) -> str:
    """Ascending numbers as they stand in a row's braces: "{0-60}" or "{0-2,5}"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{{{','.join(texts)}}}"


def _choices(inside: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdigit():
            found += [str(number) for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found
