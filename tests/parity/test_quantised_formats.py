"""What compressed-tensors makes of the same tensors, by its own code: matrices and stored forms.

Its own values are rounded to the type of the scales at the end; ours are those before that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file

from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.quant.registry import dequantize
from support.quantised import RECIPES, description, write_quantised

MODULE = "model.layers.0.mlp.down_proj"
# The library has stopped reading columns in another order than their groups.
OF_THE_LIBRARY = [
    name for name, recipe in RECIPES.items() if "config_groups" in recipe.config and "actorder" not in name
]


def values_of(checkpoint: Checkpoint) -> torch.Tensor:
    """Our values of the module's matrix."""
    wanted = {facts.name: Wanted.whole(facts.name, facts.shape) for facts in checkpoint.tensors.values()}
    found: dict[str, torch.Tensor] = {}

    def keep(item: Wanted, weight: Any) -> None:
        if item.name == f"{MODULE}.weight":
            found[item.name] = dequantize(weight)

    read_tensors(checkpoint, list(wanted.values()), keep)
    return found[f"{MODULE}.weight"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(MODULE)}


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_values_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    folder = write_quantised(tmp_path, recipe, description(num_layers=1))
    kind, group = recipe.config["format"], recipe.config["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    theirs = BaseCompressor.get_value_from_registry(kind).decompress(stored(folder), scheme)["weight"]
    ours = values_of(open_checkpoint(folder))
    assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("name", ["int4 group 32", "int4 group 128 asymmetric", "int8", "fp8 channel"])
def test_what_the_library_stores_is_read(tmp_path: Path, name: str) -> None:
    """The tensors of our own generator are those that the library makes of the same values and scales."""
    recipe = RECIPES[name]
    folder = write_quantised(tmp_path, recipe, description(num_layers=1))
    kind, group = recipe.config["format"], recipe.config["config_groups"]["group_0"]
    scheme, compressor = QuantizationScheme(**group), BaseCompressor.get_value_from_registry(kind)
    mine = stored(folder)
    plain = compressor.decompress(dict(mine), scheme) | {"weight": values_of(open_checkpoint(folder))}
    again = compressor.compress(
        {word: plain[word] for word in plain if word in ("weight", "weight_scale", "weight_zero_point")},
        scheme,
    )
    for word in mine.keys() & again.keys():
        assert torch.equal(again[word], mine[word]), word


def test_awq_is_what_the_converter_of_the_library_makes_of_it(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, RECIPES["awq"], description(num_layers=1))
    tensors = {f"{MODULE}.{word}": tensor for word, tensor in stored(folder).items()}
    converted = AutoAWQConverter(group_size=64).process(tensors)
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    parts = {name.rpartition(".")[2]: tensor for name, tensor in converted.items()}
    theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
    assert torch.equal(values_of(open_checkpoint(folder)).to(theirs.dtype), theirs)
