"""The byte geometry against the constants of the gguf package."""

from __future__ import annotations

import gguf
import pytest

from firstlight.facts.checkpoint.formats import GGML_TYPE_NAMES, SUPPORTED


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name in GGML_TYPE_NAMES.values()])
def test_block_sizes_are_those_of_gguf(name: str) -> None:
    geometry = SUPPORTED[name]
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (geometry.block_values, geometry.block_bytes) == expected


def test_type_names_are_those_of_gguf() -> None:
    for type_id, name in GGML_TYPE_NAMES.items():
        if type_id in gguf.GGMLQuantizationType._value2member_map_:
            assert gguf.GGMLQuantizationType(type_id).name == name


def test_row_bytes() -> None:
    assert SUPPORTED["Q4_1"].row_bytes(64) == 40
    assert SUPPORTED["BF16"].row_bytes(3) == 6
    with pytest.raises(ValueError, match="do not fill whole Q8_0 blocks"):
        SUPPORTED["Q8_0"].row_bytes(33)
