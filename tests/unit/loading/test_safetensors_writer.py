"""Our safetensors files as the safetensors package reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firstlight.loading.safetensors_writer import SafetensorsWriter


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"z": (3, 5), "a": (7,), "m": (2, 2)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def write(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, limit: int
) -> SafetensorsWriter:
    writer = SafetensorsWriter(folder, {name: tuple(t.shape) for name, t in tensors.items()}, dtype, limit)
    for name, values in tensors.items():
        writer.write(name, values)
    writer.finish()
    return writer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tensors_of(dtype)
    writer = write(tmp_path, tensors, dtype, 1 << 20)
    assert writer.file_names == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], values) for name, values in tensors.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = tensors_of(torch.float32)
    writer = write(tmp_path, tensors, torch.float32, 60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert writer.file_names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert index["metadata"]["total_size"] == 4 * (15 + 7 + 4)
    for name, values in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], values)


def test_what_was_not_announced_is_caught(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, {"a": (2,), "b": (2,)}, torch.float32)
    with pytest.raises(AssertionError, match="b came before a"):
        writer.write("b", torch.zeros(2))
    writer = SafetensorsWriter(tmp_path, {"a": (2,)}, torch.float32)
    with pytest.raises(AssertionError, match="1 announced"):
        writer.finish()
    with pytest.raises(AssertionError, match="shape"):
        writer.write("a", torch.zeros(3))
