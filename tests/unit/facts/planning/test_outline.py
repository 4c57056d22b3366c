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
from firstlight.facts.checkpoint.weight_schemes import DeclaredWeights, read_scheme
from firstlight.facts.hf.hf_config_writer import hf_config
from firstlight.facts.planning.declared import declared_rows
from firstlight.facts.planning.outline import built_in_names, open_outline, read_built_in
from firstlight.facts.planning.tensor_groups import HeaderRow
from support.experts import GROUPED, kimi

DTYPES = {"BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
UP = "model.layers.0.mlp.up_proj"


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
    weights = {"num_bits": 4, "group_size": 32, "symmetric": False}
    packed = PACKED | {"config_groups": {"group_0": {"weights": weights}}, "ignore": None}
    declared = read_scheme({"quantization_config": packed}, "config.json")
    assert declared.tensors(UP, UP, (16, 64)) == [
        ("weight_packed", "I32", (16, 8)),
        ("weight_scale", "BF16", (16, 2)),
        ("weight_shape", "I32", (2,)),
        ("weight_zero_point", "I32", (2, 2)),
    ]


def test_a_matrix_in_blocks_of_floats() -> None:
    assert read_scheme({"quantization_config": BLOCKS}, "config.json").tensors(UP, UP, (300, 256)) == [
        ("weight", "F8_E4M3", (300, 256)),
        ("weight_scale_inv", "F32", (3, 2)),
    ]


def test_names_that_a_scheme_leaves_out() -> None:
    left = ["lm_head", "model.layers.1", "self_attn.q_proj"]
    blocks = read_scheme({"quantization_config": BLOCKS | {"modules_to_not_convert": left}}, "config.json")
    packed = read_scheme({"quantization_config": PACKED}, "config.json")
    plain = [("weight", "BF16", (64, 64))]

    def is_plain(declared: DeclaredWeights, module: str, prefix: str = "") -> bool:
        return declared.tensors(module, prefix + module, (64, 64)) == plain

    for module in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.{0-60}.self_attn.{q,k}_proj"):
        assert is_plain(blocks, module), module
        assert is_plain(blocks, module, "language_model."), module
    for module in ("model.layers.10.mlp.up_proj", "model.layers.{0-60}.mlp.{gate,up}_proj", "a.other_head"):
        assert not is_plain(blocks, module), module
    for module in ("lm_head", "model.layers.1.self_attn.o_proj", "model.layers.{0-3}.mlp.{gate,up}_proj"):
        assert is_plain(packed, module, "language_model."), module
    assert not is_plain(packed, "model.layers.{1-60}.mlp.experts.{0-383}.{gate,up}_proj", "language_model.")


def test_each_group_has_its_own_modules() -> None:
    groups = {
        "few": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 4, "group_size": 64}},
        "rest": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
    }
    config = {"quantization_config": PACKED | {"config_groups": groups, "ignore": ["lm_head"]}}
    declared = read_scheme(config, "config.json")
    for module, num_groups in (("a.self_attn.q_proj", 2), (UP, 4)):
        stored = {name: shape for name, _, shape in declared.tensors(module, module, (8, 128))}
        assert stored["weight_scale"] == (8, num_groups)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch_dtype": "float8"}, "the type 'float8' is not known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' weights are not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' weights are not known"),
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
