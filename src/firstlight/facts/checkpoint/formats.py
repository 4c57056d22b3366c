"""Weight formats as byte geometry: how many bytes hold how many values.

The arithmetic of a format (what the bytes mean) lives in the room `quant`; here is only what is needed to
find and check byte ranges without torch. Invariant: `SUPPORTED` and `quant.registry.FORMATS` have the same
names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockGeometry:
    """`block_values` neighbouring values of a row share one block of `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, num_values: int) -> int:
        """Bytes of `num_values` neighbouring values; they must fill whole blocks."""
        blocks, rest = divmod(num_values, self.block_values)
        if rest:
            raise ValueError(
                f"{num_values} values do not fill whole {self.name} blocks of {self.block_values}"
            )
        return blocks * self.block_bytes


SUPPORTED: dict[str, BlockGeometry] = {
    geometry.name: geometry
    for geometry in (
        BlockGeometry("F32", 1, 4),
        BlockGeometry("F16", 1, 2),
        BlockGeometry("BF16", 1, 2),
        BlockGeometry("Q8_0", 32, 34),
        BlockGeometry("Q4_0", 32, 18),
        BlockGeometry("Q4_1", 32, 20),
        BlockGeometry("Q4_K", 256, 144),
        BlockGeometry("Q6_K", 256, 210),
        # What the tensors of a quantised safetensors matrix are put together to; see `quant.packings`.
        BlockGeometry("INT4", 32, 20),
        BlockGeometry("INT4_ZERO", 32, 24),
        BlockGeometry("INT8", 32, 36),
        BlockGeometry("FP8", 32, 36),
        BlockGeometry("FP4", 16, 12),
    )
}

# The ids of GGML's tensor types, so that an error can name the type it cannot read.
GGML_TYPE_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
