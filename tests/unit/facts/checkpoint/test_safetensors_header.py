"""The safetensors header against the safetensors package, and against files made to harm."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from firstlight.base.errors import FirstlightError, ModelFileError
from firstlight.facts.checkpoint import safetensors_header
from firstlight.facts.checkpoint.safetensors_header import read_safetensors_header


def write(tmp_path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: object = (4,), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_equals_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "größe": torch.ones(2, dtype=torch.float64),
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_safetensors_header(path)
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert entries.keys() == set(file.keys())
        for name, found in entries.items():
            part = file.get_slice(name)
            assert list(found.shape) == part.get_shape()
            assert found.dtype == part.get_dtype()
            raw = content[found.offset : found.offset + found.nbytes]
            assert raw == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


BAD_HEADERS = {
    "not json": b"{nope",
    "not utf-8": b'{"\xff": 1}',
    "a list": [],
    "deep": b'{"a":' * 200_000,
    "entry is a number": {"t": 5},
    "no offsets": {"t": {"dtype": "U8", "shape": [4]}},
    "negative offset": {"t": entry(-4, 0)},
    "text offset": {"t": {"dtype": "U8", "shape": [4], "data_offsets": ["0", "4"]}},
    "float size": {"t": entry(0, 4, [4.0])},
    "boolean size": {"t": entry(0, 1, [True])},
    "negative size": {"t": entry(0, 4, [-2, -2])},
    "huge size": {"t": entry(0, 4, [1 << 70])},
    "unknown type": {"t": entry(0, 4, dtype="Q8")},
    "type is a number": {"t": entry(0, 4, dtype=3)},
    "too few bytes": {"t": entry(0, 3)},
    "backwards": {"t": entry(4, 0)},
    "hole at the start": {"t": entry(4, 8)},
    "hole": {"t": entry(0, 4), "u": entry(5, 9)},
    "overlap": {"t": entry(0, 4), "u": entry(2, 6)},
    "past the end": {"t": entry(0, 16, [16])},
    "too much data": {"t": entry(0, 4)},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_headers(tmp_path: Path, header: object) -> None:
    path = write(tmp_path, header, bytes(8))
    with pytest.raises(ModelFileError, match=r"m\.safetensors"):
        read_safetensors_header(path)


def test_lengths_are_not_believed(tmp_path: Path) -> None:
    for length in (1 << 62, 100_000_001, 99_999_999, 50):
        with pytest.raises(ModelFileError, match="truncated|claims a header"):
            read_safetensors_header(write(tmp_path, {}, length=length))
    (tmp_path / "m.safetensors").write_bytes(b"\x01\x02")
    with pytest.raises(ModelFileError, match="only 2 bytes"):
        read_safetensors_header(tmp_path / "m.safetensors")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        read_safetensors_header(tmp_path / "m.safetensors")


def test_item_sizes_cover_the_types_of_the_package() -> None:
    assert {"F32", "F16", "BF16", "F64", "I64", "F8_E4M3", "F4"} <= safetensors_header.DTYPE_BITS.keys()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = json.dumps({"t": entry(0, 4), "u": entry(4, 12, [2], "F32")}).encode()
    content = bytearray(struct.pack("<Q", len(header)) + header + bytes(12))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        for found in read_safetensors_header(path).values():
            assert 0 <= found.offset <= found.offset + found.nbytes <= len(content)
    except FirstlightError:
        pass
