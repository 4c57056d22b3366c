"""Weights that are no numbers are found in every format, and named with tensor, file and count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file

from firstlight.base.errors import ModelFileError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.loading import finite
from firstlight.loading.finite import NotFinite, bad_weights, find_not_finite
from support.checkpoints import mixed_formats, random_weights, tiny_description, write_gguf, write_hf_folder
from support.damaged import EMBEDDING, change_tensor
from support.quantised import RECIPES, description, write_quantised

QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", [EMBEDDING, QUERY, NORM])
def test_they_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    monkeypatch.setattr(finite, "SLICE_VALUES", 1024)  # several slices of a matrix
    tiny = tiny_description()
    folder = write_hf_folder(tmp_path / "m", tiny, random_weights(tiny), dtype=dtype)
    assert find_not_finite(open_checkpoint(folder)) == []

    def damage(values: torch.Tensor) -> None:
        values.view(-1)[-2:] = torch.tensor([torch.nan, -torch.inf])
        values.view(-1)[0] = torch.nan

    change_tensor(folder, name, damage)
    (found,) = find_not_finite(open_checkpoint(folder))
    assert (found.name, Path(found.path).name) == (name, "model.safetensors")
    assert (found.num_nan, found.num_infinite) == (2, 1)
    assert found.num_values == len(load_file(folder / "model.safetensors")[name].view(-1))


def test_the_file_of_a_shard_is_named(tmp_path: Path) -> None:
    tiny = tiny_description()
    folder = write_hf_folder(tmp_path / "m", tiny, random_weights(tiny), num_shards=3)
    path = next(path for path in folder.glob("*.safetensors") if QUERY in load_file(path))
    tensors = load_file(path)
    tensors[QUERY][3, 3] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    (found,) = find_not_finite(open_checkpoint(folder))
    assert found.path == str(path)
    assert f"{path}: the tensor {QUERY} holds 1 infinite among its 4096 values" in str(bad_weights([found]))


def test_a_scale_of_a_quantised_gguf(tmp_path: Path) -> None:
    tiny = tiny_description(tie_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", tiny, random_weights(tiny), format_of=mixed_formats)
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(t for t in reader.tensors if t.tensor_type == GgmlType.Q4_0)
    tensor.data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    reader.data.flush()
    (found,) = find_not_finite(open_checkpoint(path))
    assert found.num_nan == 32  # all that the scale is for
    assert found.path == str(path)


@pytest.mark.parametrize(
    ("recipe", "part"), [("int4 group 32", "weight_scale"), ("fp8 block", "weight_scale_inv")]
)
def test_a_scale_of_quantised_safetensors(tmp_path: Path, recipe: str, part: str) -> None:
    name = "model.layers.0.mlp.up_proj"
    write_quantised(tmp_path, RECIPES[recipe], description(num_layers=1))
    assert find_not_finite(open_checkpoint(tmp_path)) == []
    change_tensor(tmp_path, f"{name}.{part}", lambda values: values[-1].fill_(torch.inf))
    (found,) = find_not_finite(open_checkpoint(tmp_path))
    assert found.name == f"{name}.weight"


def test_a_head_that_is_not_served_is_not_looked_at(tmp_path: Path) -> None:
    tiny = tiny_description(tie_embeddings=True)
    folder = write_hf_folder(tmp_path / "m", tiny, random_weights(tiny))
    path = folder / "model.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.full((64, 64), torch.nan)}, path)
    assert find_not_finite(open_checkpoint(folder)) == []


WORDS: dict[str, tuple[Callable[[], list[NotFinite]], str]] = {
    "one": (
        lambda: [NotFinite("a", "f", 8, 2, 0)],
        "f: the tensor a holds 2 NaN among its 8 values: ",
    ),
    "both kinds": (lambda: [NotFinite("a", "f", 8, 2, 1)], "2 NaN and 1 infinite among its 8 values"),
    "several": (lambda: [NotFinite("a", "f", 8, 2, 1)] * 3, "and 2 other tensors are alike"),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_error_is_that_of_a_bad_file(name: str) -> None:
    found, words = WORDS[name]
    error = bad_weights(found())
    assert isinstance(error, ModelFileError)
    assert error.exit_code == 3
    assert words in str(error)
    assert "Download the file again" in error.hint
