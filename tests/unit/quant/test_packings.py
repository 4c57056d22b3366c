"""Matrices that safetensors store in several tensors: exact values, and slices like those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.checkpoint import Checkpoint, open_checkpoint
from firstlight.facts.checkpoint.packings import PACKINGS as NAMED
from firstlight.loading.plan import Wanted
from firstlight.loading.reader import read_tensors
from firstlight.quant.packings import PACKINGS
from firstlight.quant.registry import AFFINE_FORMATS, HALVED_FORMATS, dequantize
from firstlight.quant.weight import Weight
from support.quantised import RECIPES, description, write_quantised

ROWS, COLUMNS = 128, 256  # of the matrix that is looked at
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module", params=RECIPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = RECIPES[request.param]
    return write_quantised(tmp_path_factory.mktemp("model"), recipe, description(num_layers=1))


def read(checkpoint: Checkpoint, changed: Wanted | None = None) -> dict[str, Weight]:
    """Every tensor; of the one of `changed`, that slice."""
    wanted = {facts.name: Wanted.whole(facts.name, facts.shape) for facts in checkpoint.tensors.values()}
    if changed is not None:
        wanted[changed.name] = changed
    weights: dict[str, Weight] = {}
    read_tensors(checkpoint, list(wanted.values()), lambda item, weight: weights.update({item.name: weight}))
    return weights


def test_facts_and_quant_know_the_same_packings() -> None:
    assert NAMED.keys() == PACKINGS.keys()


def test_values_are_exactly_those_that_the_tensors_mean(folder: Path) -> None:
    checkpoint, twin = open_checkpoint(folder), open_checkpoint(folder / "twin")
    weights, exact = read(checkpoint), read(twin)
    assert weights.keys() == exact.keys()
    for name, weight in weights.items():
        assert torch.equal(dequantize(weight), dequantize(exact[name])), name


def test_blocks_of_rows_and_columns_need_not_be_whole(tmp_path: Path) -> None:
    """As of DeepSeek's kv_a_proj_with_mqa, which has 576 rows."""
    model = description(num_layers=1, intermediate_size=320)
    folder = write_quantised(tmp_path, RECIPES["fp8 block"], model)
    weights, exact = read(open_checkpoint(folder)), read(open_checkpoint(folder / "twin"))
    for name, weight in weights.items():
        assert torch.equal(dequantize(weight), dequantize(exact[name])), name


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, RECIPES["fp8 channel"], description(num_layers=1))
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME].view(torch.uint8)[5, 7] = 0xFF
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="mlp.down_proj.weight are not numbers"):
        read(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("recipe", "name", "value", "match"),
    [
        ("gptq desc_act", "g_idx", 1, "do not have 128 columns each"),
        ("gptq desc_act", "g_idx", -3, "do not have 128 columns each"),
        ("gptq desc_act", "g_idx", 2**31 - 1, "do not have 128 columns each"),
        ("gptq", "qzeros", 0x66666666, "zero points of .*down_proj.weight are not 8"),
    ],
)
def test_numbers_that_contradict_the_scheme_are_refused(
    tmp_path: Path, recipe: str, name: str, value: int, match: str
) -> None:
    folder = write_quantised(tmp_path, RECIPES[recipe], description(num_layers=1))
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME.replace(".weight", f".{name}")].view(-1)[:9] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=match):
        read(open_checkpoint(folder))


@pytest.mark.parametrize("bounds", [(0, 1), (3, 77), (64, 128), (127, 128)])
def test_some_rows_are_those_of_the_whole(folder: Path, bounds: tuple[int, int]) -> None:
    checkpoint = open_checkpoint(folder)
    whole = read(checkpoint)[NAME]
    part = read(checkpoint, Wanted.row_slice(NAME, (ROWS, COLUMNS), *bounds))[NAME]
    assert part.shape == (bounds[1] - bounds[0], COLUMNS)
    assert torch.equal(part.raw, whole.raw[slice(*bounds)])


@pytest.mark.parametrize("bounds", [(0, 32), (32, 160), (128, 256), (224, 256)])
def test_some_columns_are_those_of_the_whole(folder: Path, bounds: tuple[int, int]) -> None:
    checkpoint = open_checkpoint(folder)
    whole = read(checkpoint)[NAME]
    if whole.order is not None:
        with pytest.raises(UnsupportedError, match=r"mlp.down_proj is stored as .* columns in another"):
            read(checkpoint, Wanted.column_slice(NAME, (ROWS, COLUMNS), *bounds))
        return
    part = read(checkpoint, Wanted.column_slice(NAME, (ROWS, COLUMNS), *bounds))[NAME]
    assert part.shape == (ROWS, bounds[1] - bounds[0])
    assert torch.equal(dequantize(part), dequantize(whole)[:, slice(*bounds)])


def test_numbers_of_blocks_are_exact(folder: Path) -> None:
    weight = read(open_checkpoint(folder))[NAME]
    blocks = AFFINE_FORMATS.get(weight.format)
    if blocks is None:
        return  # a format without whole codes
    affine = blocks.affine(weight)
    codes = affine.codes.float().view(*affine.scale.shape, -1)
    values = codes * affine.scale[..., None] + affine.offset[..., None]
    assert torch.equal(values.view(weight.shape), _as_in_blocks(weight))


def test_halved_scales_keep_what_float16_can_hold(folder: Path) -> None:
    weight = read(open_checkpoint(folder))[NAME]
    halved = HALVED_FORMATS.get(weight.format)
    if halved is None or halved.halved_format is None:
        return  # a format whose layout keeps the scales, or is like none of GGUF
    as_gguf = Weight(halved.halved_format, weight.shape, halved.half_blocks(weight))
    assert torch.equal(dequantize(as_gguf), _as_in_blocks(weight))


def _as_in_blocks(weight: Weight) -> torch.Tensor:
    values = dequantize(weight)
    return values if weight.order is None else values[:, weight.order]
