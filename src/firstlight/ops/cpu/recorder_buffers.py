"""What a tape hands on between its operators: activations, and the buffers that all layers share.

Invariant: a buffer of one name has one width, and stays where it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from firstlight.ops.cpu.library import Codes, Op


@dataclass
class Activation:
    """The output of a recorded operator. It gets floats, codes or both, as its readers ask for them."""

    op: Op
    width: int
    floats_place: int  # where the operator takes the address of its float output
    codes_place: int
    name: str
    of_logit_rows: bool = False
    floats: torch.Tensor | None = None  # of an operator that writes only these


@dataclass
class Part:
    """Operators that one call runs, and what PyTorch then does, given the number of rows."""

    ops: list[Op] = field(default_factory=list)
    then: Callable[[int], object] | None = None
    program: ctypes.Array[Op] | None = None


class Buffers:
    """For `max_rows` rows, made when they are asked for."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._floats: dict[str, torch.Tensor] = {}
        self._codes: dict[str, Codes] = {}

    def floats(self, name: str, width: int) -> torch.Tensor:
        """Floats [rows, width]."""
        if name not in self._floats:
            self._floats[name] = torch.zeros(self._max_rows, width)
        assert self._floats[name].shape[1] == width, f"the width of {name} differs between layers"
        return self._floats[name]

    def codes(self, name: str, width: int, times: int = 1) -> Codes:
        """8-bit codes of so many rows for each."""
        if name not in self._codes:
            self._codes[name] = Codes(self._max_rows * times, width)
        assert self._codes[name].width == width, f"the width of {name} differs between layers"
        return self._codes[name]
