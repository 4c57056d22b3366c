"""Outlines of folders: headers where there are files, rules where there are none, and the same of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from firstlight.base.errors import FirstlightError, UnsupportedError
from firstlight.facts.declared import declared_rows
from firstlight.facts.hf_config_writer import hf_config
from firstlight.facts.outline import built_in_names, open_outline, read_built_in
from firstlight.facts.tensor_groups import HeaderRow
from firstlight.facts.weight_schemes import BlockFloats, PackedIntegers, Scheme, read_scheme
from support.experts import GROUPED, kimi

DTYPES = {"BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Kimi-K2.5 in small: nested, packed experts, and a part that sees images."""
    description = kimi(experts=replace(GROUPED, inner_size=64))
    config = {
        "model_type": "kimi_k25",
        "text_config": {**hf_config(description, "bfloat16"), "quantization_config": PACKED},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = declared_rows(description, read_scheme(config, "config"), "language_model.")
    rows.append(HeaderRow("vision_tower.blocks.{0-1}.weight", "BF16", (3, 4)))
    tensors = {name: torch.zeros(row.shape, dtype=DTYPES[row.dtype]) for row in rows for name in row.names()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_headers_and_rules_give_the_same(folder: Path) -> None:
    read = open_outline(str(folder))
    (folder / "model.safetensors").unlink()
    ruled = open_outline(str(folder))

    def key(group: Any) -> tuple[Any, ...]:
        return (group.name, group.format, group.shape)

    assert sorted(read.groups, key=key) == sorted(ruled.groups, key=key)
    assert (read.num_files, ruled.num_files) == (1, 0)
    assert read.notes == ("2 tensors (48 bytes) are no part of the language model and are not loaded",)


def test_only_experts_are_packed(folder: Path) -> None:
    outline = open_outline(str(folder))
    packed = [group for group in outline.groups if group.name.endswith("weight_packed")]
    assert {group.name.partition("experts.#.")[2] for group in packed} == {
        f"{name}_proj.weight_packed" for name in ("gate", "up", "down")
    }
    assert all(group.num == 2 * 12 for group in packed)  # layers with experts, and experts
    assert any(group.name == "model.layers.#.mlp.down_proj.weight" for group in outline.groups)


def test_a_matrix_in_packed_integers() -> None:
    packing = PackedIntegers(4, 32, False, "BF16")
    assert packing.tensors((16, 64)) == [
        ("weight_packed", "I32", (16, 8)),
        ("weight_scale", "BF16", (16, 2)),
        ("weight_shape", "I32", (2,)),
        ("weight_zero_point", "I32", (2, 2)),
    ]


def test_a_matrix_in_blocks_of_floats() -> None:
    assert BlockFloats(128, 128).tensors((300, 256)) == [
        ("weight", "F8_E4M3", (300, 256)),
        ("weight_scale_inv", "F32", (3, 2)),
    ]


def test_names_that_a_scheme_leaves_out() -> None:
    scheme = Scheme("BF16", BlockFloats(8, 8), ("lm_head", "model.layers.1", "re:.*self_attn.*"))
    for module in ("lm_head", "language_model.lm_head", "model.layers.1.mlp.up_proj", "a.self_attn.q_proj"):
        assert scheme.packs(module) is None
    for module in ("model.layers.10.mlp.up_proj", "model.layers.{0-60}.mlp.{gate,up}_proj"):
        assert scheme.packs(module) is not None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch_dtype": "float8"}, "the type 'float8' is not known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' weights are not known"),
        ({"quantization_config": {**PACKED, "config_groups": {}}}, "'compressed-tensors' weights"),
    ],
)
def test_schemes_that_are_not_known(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as caught:
        read_scheme(changes, "config.json")
    assert caught.value.hint


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FirstlightError) as caught:
        open_outline(str(tmp_path))
    assert caught.value.hint


def test_every_built_in_model_can_be_opened() -> None:
    for name in built_in_names():
        outline = open_outline(name)
        assert outline.name == name
        assert outline.num_files == read_built_in(name).num_files
