"""How a module's weight is stored by what made it: the words of quantization_config, brought to one `Scheme`.

Invariant: a scheme that exists here can be read; others are `Unreadable`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """`packing` is a key of `packings.PACKINGS` and of `quant.packings.PACKINGS`; `words` are for messages.

    `group_size`: inputs that share a scale; 0: a whole row. `block`: rows and columns that share one.
    """

    packing: str
    words: str
    group_size: int = 0
    symmetric: bool = True
    block: tuple[int, int] | None = None
    zero_shift: int = 0  # what stored zero points are less than the real ones
    divides: bool = False  # the scale of the whole matrix divides, where that of others multiplies

    @property
    def format(self) -> str:
        """The weight format that the stored tensors are put together to, a key of `formats.SUPPORTED`."""
        name = {"fp8": "FP8", "int8": "INT8", "nvfp4": "FP4", "mxfp4": "FP4"}.get(self.packing)
        return name or ("INT4" if self.symmetric else "INT4_ZERO")


@dataclass(frozen=True)
class Unreadable:
    """A scheme that this version cannot read, in words, and what to do."""

    words: str
    remedy: str


AnyScheme = Scheme | Unreadable
