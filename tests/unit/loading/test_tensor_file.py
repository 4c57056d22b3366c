"""Small safetensors files of several types, beside what the safetensors package reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.base.errors import ModelFileError, ResourceError
from firstlight.loading.tensor_file import read_metadata, read_tensor_file, write_tensor_file

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "ids": torch.arange(7),
    "small": torch.arange(5, dtype=torch.int8),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and first[n].equal(second[n]) for n in first
    )


def test_both_ways_with_the_package(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "ours", TENSORS, {"note": "a text"})
    assert same(load_file(tmp_path / "ours"), TENSORS)
    assert same(read_tensor_file(tmp_path / "ours"), TENSORS)
    assert read_metadata(tmp_path / "ours")["note"] == "a text"
    save_file(TENSORS, tmp_path / "theirs")
    assert same(read_tensor_file(tmp_path / "theirs"), TENSORS)
    assert read_tensor_file(tmp_path / "theirs", ("ids",)).keys() == {"ids"}


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensor_file(path, TENSORS, {})
    before = path.read_bytes()
    with pytest.raises(KeyError):
        write_tensor_file(path, {"odd": torch.zeros(2, dtype=torch.complex128)}, {})
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ResourceError, match="cannot be written"):
        write_tensor_file(path / "below", TENSORS, {})


def test_a_cut_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensor_file(path, TENSORS, {})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelFileError, match="truncated"):
        read_tensor_file(path)
