"""quantization_config: which module is stored how, and errors that name module and scheme."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from firstlight.base.errors import FirstlightError, ModelFileError, UnsupportedError
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.checkpoint.quantization import read_quantization
from support.quantised import RECIPES, compressed, description, write_quantised

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
GATE = "model.layers.0.mlp.gate_proj"
Tensors = dict[str, torch.Tensor]


def changed(
    folder: Path,
    recipe: str,
    tensors: Callable[[Tensors], None] = lambda _: None,
    **config: Any,
) -> Path:
    """A model of one layer whose tensors or quantization_config are not as the recipe has them."""
    write_quantised(folder, RECIPES[recipe], description(num_layers=1))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(values))
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_matrices_are_joined_and_the_rest_stays(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(write_quantised(tmp_path, RECIPES[name], description(num_layers=1)))
    twin = open_checkpoint(tmp_path / "twin")
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == {
        n: t.shape for n, t in twin.tensors.items()
    }
    for tensor in checkpoint.tensors.values():
        expected = RECIPES[name].format if tensor.name.endswith("_proj.weight") else "BF16"
        assert tensor.format == expected
    assert checkpoint.total_bytes <= (tmp_path / "model.safetensors").stat().st_size


def test_groups_by_class_by_name_and_by_pattern() -> None:
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "rest": {"targets": ["Linear"], "format": "pack-quantized", "weights": INT4},
            "some": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": FLOAT8},
            "one": {
                "targets": [GATE],
                "format": "int-quantized",
                "weights": FLOAT8 | {"type": "int"},
            },
        },
        "ignore": ["lm_head", "re:.*shared_experts.*"],
    }
    quantization = read_quantization(config, "config.json")

    def packing(name: str) -> str:
        return quantization.scheme_of(name, name).packing

    assert packing("model.layers.0.mlp.experts.3.up_proj") == "pack_quantized"
    assert packing("model.layers.7.self_attn.q_proj") == "fp8"
    assert packing(GATE) == "int8"
    assert quantization.scheme_of("model.x", f"language_model.{GATE}").packing == "pack_quantized"
    assert quantization.scheme_of("model.x", GATE).packing == "int8"
    for name in ("lm_head", "model.layers.0.mlp.shared_experts.up_proj"):
        with pytest.raises(ModelFileError, match=f"{name} is to be ignored"):
            quantization.scheme_of(name, name)


def test_a_mixed_model_as_kimi_has_it(tmp_path: Path) -> None:
    """Attention as it was, matrices of the feed-forward layers in four bits, the configuration nested."""
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    config = compressed("pack-quantized", INT4) | {"ignore": ignored}
    recipe = RECIPES["int4 group 32"]
    write_quantised(
        tmp_path, recipe, description(num_layers=1), chosen=lambda name: ".mlp." in name, config=config
    )
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"] = {"quantization_config": values.pop("quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    formats = {name: tensor.format for name, tensor in open_checkpoint(tmp_path).tensors.items()}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "BF16"
    assert formats[f"{GATE}.weight"] == "INT4"


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    write_quantised(tmp_path, RECIPES["nvfp4 of modelopt"], description(num_layers=1))
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    assert open_checkpoint(tmp_path).tensors[f"{GATE}.weight"].format == "FP4"


@pytest.mark.parametrize(
    "spelling", ["e4m3", "E4M3", "float8_e4m3fn", "e4m3fn", "fp8_e4m3", "F8_E4M3", "torch.float8_e4m3fn"]
)
def test_every_spelling_of_e4m3_is_one_value(tmp_path: Path, spelling: str) -> None:
    """MiniMax-M2 is published with "fmt": "float8_e4m3fn", DeepSeek-V3 with "e4m3"."""
    tensor = open_checkpoint(changed(tmp_path, "fp8 block", fmt=spelling)).tensors[f"{GATE}.weight"]
    assert tensor.format == "FP8"


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("int4 group 32", {"quant_method": "compressed_tensors"}),
        ("fp8 block", {"quant_method": "FP8"}),
        ("awq", {"quant_method": "AWQ", "version": "GEMM"}),
        ("gptq", {"quant_method": "GPTQ", "checkpoint_format": "GPTQ"}),
        ("nvfp4 of modelopt", {"quant_algo": "nvfp4"}),
    ],
)
def test_engines_take_names_in_any_case(tmp_path: Path, recipe: str, config: dict[str, str]) -> None:
    assert (
        open_checkpoint(changed(tmp_path / "a", recipe, **config)).formats
        == open_checkpoint(changed(tmp_path / "b", recipe)).formats
    )


UNREADABLE = {
    "gptq of 3 bits": ("gptq", {"bits": 3}, "gptq gptq int3 group 128"),
    "marlin": ("awq", {"version": "marlin"}, "awq marlin int4 group 64"),
    "groups of 16": ("awq", {"group_size": 16}, "awq gemm int4 group 16"),
    "another method": ("awq", {"quant_method": "hqq"}, "quant_method hqq"),
    "e5m2": ("fp8 block", {"fmt": "e5m2"}, "fp8 e5m2"),
    "e4m3 of other exponents": ("fp8 block", {"fmt": "float8_e4m3fnuz"}, "fp8 float8_e4m3fnuz"),
    "fp8 by modelopt in blocks": ("nvfp4 of modelopt", {"quant_algo": "FP8_PB_WO"}, "modelopt FP8_PB_WO"),
    "an unknown format": ("int4 group 32", {"format": "marlin-24"}, "marlin-24 int4 group 32 symmetric"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_scheme_is_named_with_its_module(tmp_path: Path, name: str) -> None:
    recipe, config, words = UNREADABLE[name]
    folder = changed(tmp_path, recipe, **config)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.\w+\.\w+_proj") as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)
    assert "compressed-tensors" in caught.value.hint


def test_zero_points_that_the_configuration_has_and_the_files_do_not(tmp_path: Path) -> None:
    config = compressed("pack-quantized", INT4 | {"symmetric": False})
    write_quantised(tmp_path, RECIPES["int4 group 32"], description(num_layers=1), config=config)
    with pytest.raises(ModelFileError, match="config.json and the tensors disagree") as caught:
        open_checkpoint(tmp_path)
    assert "symmetric: false" in str(caught.value)
    assert "weight_zero_point" in str(caught.value)
    assert "config.json" in caught.value.hint


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{GATE}.{name}"]

    return change


def _put(name: str, values: torch.Tensor) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{GATE}.{name}"] = values

    return change


FAULTY = {
    "no scales": ("int4 group 32", _drop("weight_scale"), "weight_scale is missing"),
    "scales of a wrong shape": ("fp8 block", _put("weight_scale_inv", torch.ones(3, 1)), r"demands \[2, 1\]"),
    "scales of a wrong type": ("mxfp4", _put("weight_scale", torch.ones(256, 4)), "has the type F32"),
    "three dimensions": (
        "int8",
        _put("weight", torch.zeros(2, 128, 128, dtype=torch.int8)),
        "rows and columns",
    ),
    "nothing": ("int8", _put("weight", torch.zeros(0, 128, dtype=torch.int8)), "rows and columns"),
    "no blocks": ("int8", _put("weight", torch.zeros(256, 40, dtype=torch.int8)), "40 inputs"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_tensors_that_do_not_go_together_are_named(tmp_path: Path, name: str) -> None:
    recipe, change, match = FAULTY[name]
    folder = changed(tmp_path, recipe, change)
    with pytest.raises((ModelFileError, UnsupportedError), match=match) as caught:
        open_checkpoint(folder)
    assert re.search("gate_proj", str(caught.value))


def test_quantised_tensors_need_a_configuration(tmp_path: Path) -> None:
    folder = changed(tmp_path, "fp8 channel")
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="F8_E4M3, and config.json has no quantization_config"):
        open_checkpoint(folder)


def test_an_unknown_method_is_named_where_no_tensor_shows_it(tmp_path: Path) -> None:
    write_quantised(tmp_path, RECIPES["awq"], description(num_layers=1), chosen=lambda _: False)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedError, match="quant_method torchao cannot be read"):
        open_checkpoint(tmp_path)


def test_scales_of_a_kv_cache_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    assert "model.layers.0.self_attn.k_scale" not in open_checkpoint(changed(tmp_path, "int8", add)).tensors


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("quant_method", "bits", "group_size", "version", "config_groups", "format", "ignore", "fmt")
FIELDS += ("weight_block_size", "quantization", "quant_algo", "desc_act", "sym", "zero_point")


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(RECIPES)), data=st.data())
def test_any_value_in_any_field_is_handled(name: str, data: st.DataObject) -> None:
    changes = {key: data.draw(anything) for key in data.draw(st.sets(st.sampled_from(FIELDS), max_size=3))}
    try:
        read_quantization({**RECIPES[name].config, **changes}, "config.json").scheme_of(GATE, GATE)
    except FirstlightError:
        return
